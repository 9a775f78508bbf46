"""Does memory grow with the number of mini-batches? Steps of each layer, each with a graph that nobody saw before.

A step draws a new edge_index, with another number of edges than the last one, and calls a layer: in inference or in
training (forward, backward, optimiser), eager, compiled or captured. After 100, 1,000 and all steps the memory is read;
from the first of these on it must not grow.

    launch     graph of a step
    eager      the layer takes the new edge_index; SparseMHA its plan; PlanRoom is filled
    compiled   the same, with torch.compile(dynamic=True)
    captured   copied into a tensor of fixed size, which the CUDA graph plans: with a PlanRoom, or in the layer

Cases of several processes run side by side: a case reads memory of its own process alone.
"""

import functools
import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from itertools import count, product
from multiprocessing import get_context
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import psutil
import torch
from torch import Tensor, nn

from common.records import NONE, Row
from fused3s import PlanRoom, capture_step, copy_padded_, plan_attention, sparse_attention
from fused3s.fused.tuning import CHECKED_EDGES
from fused3s.nn import AGNNConv, GATConv, GATv2Conv, SparseMHA, TransformerConv
from fused3s.runtime.cuda_graph import capture

NODES, HEADS, HEAD_DIM, EDGE_DIM = 256, 4, 8, 8
WIDTH = HEADS * HEAD_DIM
CHECKED, DEFERRED = 4_000, CHECKED_EDGES + 1_616  # most edges of a graph whose ids are checked now, and at a later call
SIZES = 61  # numbers of edges, each in the steps before the first reading
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "training": nullcontext,
}
# Allowed growth after the first reading, beside one graph in device memory and pinned memory: a leak is a multiple of
# the steps, noise is not.
HOST_NOISE = 64 << 20  # bytes of the process: heap arenas, libraries that are loaded late
ENTRIES_NOISE = 256  # readback slots: the host may run ahead of the GPU by this many plans
OBJECTS_NOISE, OBJECTS_PER_STEP = 10_000, 0.1  # torch.compile imports more in the first steps
ON_CPU, ON_GPU = 300, 20_000  # steps

Step = Callable[[Tensor, Tensor], None]  # with an edge_index [2, E] and edge features [E, EDGE_DIM]


class Attention(nn.Module):
    """`sparse_attention` itself, or with a plan in place of an edge_index a call of that."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, graph: Any, attr: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, HEADS, HEAD_DIM)).unbind(1)
        if isinstance(graph, Tensor):
            return sparse_attention(q, k, v, graph, shape=(NODES, NODES))
        return graph(q, k, v)


class Heads(nn.Module):
    """SparseMHA, whose graph comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = SparseMHA(WIDTH, HEADS)

    def forward(self, x: Tensor, graph: Any, attr: Tensor | None = None) -> Tensor:
        return self.mha(graph, x)


@dataclass(frozen=True)
class Layer:
    """A layer under test.

    Attributes:
        make: may take `cache` and `add_self_loops`.
        has_features: whether it takes edge features.
        eager: what a step gives the layer: its edge_index, a plan of it, or the plan of a room.
        compiled: the same, where torch.compile gets another; captured: inside a CUDA graph.
        head_dim, num_heads: of plans.
    """

    make: Callable[..., nn.Module]
    has_features: bool = False
    eager: str = "edges"
    compiled: str = ""
    captured: str = "room"
    head_dim: int = HEAD_DIM
    num_heads: int = HEADS


LAYERS: dict[str, Layer] = {}
for _conv in (TransformerConv, GATConv, GATv2Conv):
    _make, _captured = functools.partial(_conv, WIDTH, HEAD_DIM, HEADS), "room" if _conv is TransformerConv else "edges"
    LAYERS[_conv.__name__] = Layer(_make)
    LAYERS[f"{_conv.__name__}-edges"] = Layer(functools.partial(_make, edge_dim=EDGE_DIM), True, captured=_captured)
LAYERS |= {
    "AGNNConv": Layer(AGNNConv, head_dim=WIDTH, num_heads=1),
    "SparseMHA": Layer(Heads, eager="plan"),
    "sparse_attention": Layer(Attention, compiled="plan", captured="edges"),
    "PlanRoom": Layer(Attention, eager="room"),
}


@dataclass(frozen=True)
class SoakCase:
    """One row of the table; `edges` is the size of the largest graph."""

    layer: str
    mode: str
    launch: str
    edges: int

    def __str__(self) -> str:
        return f"{self.layer}/{self.mode}/{self.launch}/{self.edges}"

    @property
    def graph_bytes(self) -> int:
        """Bytes of the largest graph with its features."""
        return self.edges * (2 * 8 + LAYERS[self.layer].has_features * EDGE_DIM * 4)

    @property
    def needs_gpu(self) -> bool:
        return self.launch == "captured" or LAYERS[self.layer].eager == "room"


def soak_cases(only: Sequence[str] = (), edges: Sequence[int] = ()) -> list[SoakCase]:
    """The cases whose name has one of the texts `only` in it, the longest first.

    Args:
        edges: sizes of graphs; default: both ways in which ids are checked, and compiled and captured the later one.

    Raises:
        ValueError: there is none.
    """
    found = [
        SoakCase(layer, mode, launch, size)
        for launch, mode, layer in product(("compiled", "eager", "captured"), [*MODES][::-1], LAYERS)
        for size in edges or ((CHECKED, DEFERRED) if launch == "eager" else (DEFERRED,))
    ]
    found = [case for case in found if not only or any(text in str(case) for text in only)]
    if not found:
        raise ValueError(f"--only: {', '.join(only)} is in no case; a case is LAYER/MODE/LAUNCH/EDGES, such as {CASE}")
    return found


CASE = SoakCase("GATConv", "training", "eager", CHECKED)


class Memory(NamedTuple):
    """After a number of steps.

    Attributes:
        allocated: bytes of tensors: what torch allocated on the GPU; on a CPU, what Python holds.
        host: resident bytes of the process.
        pinned: bytes of pinned memory; 0 if torch does not tell.
        objects: Python objects that its garbage collector tracks.
        entries: entries of the package's caches that have no bound of their own.
    """

    steps: int
    allocated: int
    host: int
    pinned: int
    objects: int
    entries: int


@dataclass(frozen=True)
class Soaked:
    """The readings of one case.

    Attributes:
        error: why it ended early; "" if it did not.
    """

    case: SoakCase
    readings: list[Memory] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""

    def growth(self, name: str) -> int:
        """The most by which a field of `Memory` was larger than at the first reading."""
        first, *later = (getattr(each, name) for each in self.readings)
        return max(later, default=first) - first

    @property
    def grown(self) -> list[str]:
        """Names of the readings that grew by more than noise."""
        if len(self.readings) < 2:
            return []
        steps = self.readings[-1].steps - self.readings[0].steps
        allowed = {
            "allocated": self.case.graph_bytes,
            "host": HOST_NOISE,
            "pinned": self.case.graph_bytes,
            "objects": OBJECTS_NOISE + OBJECTS_PER_STEP * steps,
            "entries": ENTRIES_NOISE,
        }
        return [name for name, most in allowed.items() if self.growth(name) > most]


def marks_of(steps: int) -> list[int]:
    """When memory is read: after 100, 1,000 and all steps; earlier in a shorter run."""
    return sorted({max(1, min(100, steps // 4)), max(1, min(1_000, steps // 2)), steps})


def read_memory(steps: int, device: torch.device) -> Memory:
    gc.collect()
    pinned = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        gc.collect()  # also what waited for the GPU
        allocated = torch.cuda.memory_allocated(device)
        if stats := getattr(torch.cuda, "host_memory_stats", None):
            pinned = stats().get("allocated_bytes.current", 0)
    else:
        allocated = held_bytes()
    host, objects = psutil.Process().memory_info().rss, len(gc.get_objects())
    return Memory(steps, allocated, host, pinned, objects, cache_entries())


def held_bytes() -> int:
    """Bytes of the tensors that Python objects hold, on a CPU; those from before `gc.freeze` do not count."""
    storages = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided and each.device.type == "cpu":
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def cache_entries() -> int:
    """Entries of the containers that the modules of the package hold. A cache of `lru_cache` with a bound is left out:
    it fills up."""
    seen: set[int] = set()
    modules = [module for name, module in [*sys.modules.items()] if _is_ours(name)]
    return sum(_entries(each, seen) for module in modules for each in [*vars(module).values()])


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "fused3s"


def _entries(value: Any, seen: set[int]) -> int:
    if id(value) in seen or isinstance(value, (str, bytes, int, float, Tensor)):
        return 0
    seen.add(id(value))
    if hasattr(value, "cache_info") and hasattr(value, "cache_parameters"):
        return value.cache_info().currsize if value.cache_parameters()["maxsize"] is None else 0
    if isinstance(value, (Mapping, WeakKeyDictionary, WeakValueDictionary)):
        return len(value) + sum(_entries(each, seen) for each in [*value.values()])
    if isinstance(value, (list, set, frozenset, deque)):
        return len(value) + sum(_entries(each, seen) for each in [*value])
    if isinstance(value, tuple):
        return sum(_entries(each, seen) for each in value)
    if any(_is_ours(each.__module__) for each in type(value).__mro__):
        return sum(_entries(each, seen) for each in [*getattr(value, "__dict__", {}).values()])
    return 0


def graphs(case: SoakCase, device: torch.device, sizes: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """New edges and features without end, of `sizes` numbers of edges by turns."""
    generator = torch.Generator(device).manual_seed(seed)
    least = case.edges // 2 if case.edges <= CHECKED_EDGES else CHECKED_EDGES + 1
    options = {"device": device, "generator": generator}
    for step in count():
        edges = case.edges - (case.edges - least) * (step % sizes) // max(1, sizes - 1)
        yield torch.randint(NODES, (2, edges), **options), torch.randn(edges, EDGE_DIM, **options)


def make_step(case: SoakCase, device: torch.device, make: Callable[..., nn.Module] | None = None) -> Step:
    """A function that runs a step of a case; `make`: another maker of the layer."""
    layer, captured, training = LAYERS[case.layer], case.launch == "captured", case.mode == "training"
    given = {"cache": not captured, "add_self_loops": not captured}  # loops are found by a wait for the GPU
    taken = given.keys() & signature(layer.make).parameters.keys()
    model = (make or layer.make)(**{name: given[name] for name in taken}).to(device)
    x = torch.randn(NODES, WIDTH, device=device)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    form = layer.captured if captured else (case.launch == "compiled" and layer.compiled) or layer.eager
    spec = {"dtype": x.dtype, "head_dim": layer.head_dim, "num_heads": layer.num_heads, "backward": training}
    is_gat = "GAT" in case.layer
    if form == "room":
        edge_data = layer.has_features or is_gat
        room = PlanRoom((NODES, NODES), case.edges, device=device, edge_data=edge_data, **spec)
    call = torch.compile(model, dynamic=True) if case.launch == "compiled" else model

    def run(edge_index: Tensor, attr: Tensor) -> Tensor:
        with MODES[case.mode]():
            graph: Any = edge_index
            if form == "room":
                room.fill(edge_index)
                graph = room.plan
            elif form == "plan":
                graph = plan_attention(edge_index, shape=(NODES, NODES), device=device, **spec)
            out = call(x, graph, *[attr] * layer.has_features)
        if training:
            out.square().mean().backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=not captured)
        return out.detach()

    if not captured:
        return run
    padding = -1 if form == "room" else 0  # repeated edges, where there is no room for fewer
    edges = torch.zeros(2, case.edges, dtype=torch.int64, device=device)
    features = torch.zeros(case.edges, EDGE_DIM, device=device)
    if training:
        graph = capture_step(lambda: run(edges, features), model, optimiser)
    else:
        graph = capture(lambda: run(edges, features), device)

    def replay(edge_index: Tensor, attr: Tensor) -> None:
        copy_padded_(edges.T, edge_index.T, padding)
        copy_padded_(features, attr)
        graph.replay()

    return replay


def run_case(case: SoakCase, steps: int, device: torch.device, make: Callable[..., nn.Module] | None = None) -> Soaked:
    """Run the steps of a case in this process, and read its memory."""
    found, begin = Soaked(case), time.perf_counter()
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # searches for garbage look at what this case made
    try:
        if case.launch == "compiled":
            torch.compiler.reset()
        step, marks = make_step(case, device, make), marks_of(steps)
        source = graphs(case, device, min(SIZES, marks[0]))
        read_memory(0, device)  # imports what the first reading needs
        for done in range(1, steps + 1):
            step(*next(source))
            if done in marks:
                found.readings.append(read_memory(done, device))
    except Exception as error:  # the other cases go on
        text = " ".join(str(error).split())
        return Soaked(case, found.readings, time.perf_counter() - begin, f"{type(error).__name__}: {text[:300]}")
    finally:
        gc.unfreeze()
    return Soaked(case, found.readings, time.perf_counter() - begin)


def run_cases(cases: Sequence[SoakCase], steps: int, device: torch.device, processes: int) -> Iterator[Soaked]:
    """Run cases in this process, or in several, as they end."""
    if processes == 1:
        yield from (run_case(case, steps, device) for case in cases)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for done in as_completed([pool.submit(run_case, case, steps, device) for case in cases]):
            yield done.result()


def rows_of(found: Soaked, environment: Mapping[str, Any]) -> list[Row]:
    """A row for each reading of each kind of memory."""
    case = found.case
    common = {
        **environment,
        "bench": "soak",
        "config": NONE,
        "backend": "auto",
        "scope": "model",
        "variant": f"{case.layer} {case.mode}",
        "nodes": NODES,
        "nnz": case.edges,
        "heads": HEADS,
        "dim": WIDTH,
        "dtype": "float32",
        "dense": "compiled" if case.launch == "compiled" else "plain",
        "launch": "cuda_graph" if case.launch == "captured" else "eager",
        "plan": "rebuilt",
    }
    if found.error:
        return [Row(**common, metric="allocated", unit="byte", status="error", reason=found.error)]
    units = {"allocated": "byte", "host": "byte", "pinned": "byte", "objects": "objects", "entries": "entries"}
    note = f"grew: {', '.join(found.grown)}" if found.grown else NONE
    rows = []
    for each, (metric, unit) in product(found.readings, units.items()):
        value = getattr(each, metric)
        values = {"value": value, "p10": value, "p90": value, "repeats": 1}
        region = f"after {each.steps} steps"
        rows.append(Row(**common, **values, metric=metric, unit=unit, region=region, status="unchecked", note=note))
    return rows
