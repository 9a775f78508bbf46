"""Configuration of a benchmark, `configs/bench/NAME.yaml`: what is measured (`measure`), on which graphs, and how.

All benchmarks share one flat set of keys. A benchmark reads those that KEYS names for it, with the defaults there; any
other key is an error. `load_config(path, overrides, BenchConfig)` reads a file.
"""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from configs.schema import MAX_HEAD_DIM, Section, check_choice, check_label, did_you_mean, digits

if TYPE_CHECKING:
    from data import LoadedGraph

# The paper's ablation: switches of the kernel `fused3s_paper`, one changed from each variant to the next.
VARIANTS = {
    "F3S_splitR": {"split_rows": True, "reordered": False, "permuted": False},
    "F3S_splitC": {"split_rows": False, "reordered": False, "permuted": False},
    "F3S_reorderRW": {"split_rows": False, "reordered": True, "permuted": False},
    "F3S_permuteQKV": {"split_rows": False, "reordered": True, "permuted": True},  # the same as fused3s_paper
}
# The alternative that the paper decided against: blocks share out the TCBs evenly instead of the row windows.
EDGE_PARALLEL = {
    "F3S_edgeParallel": {"split_rows": False, "reordered": False, "permuted": True, "edge_parallel": True},
}
SWITCHES = VARIANTS | EDGE_PARALLEL  # all entries that are `fused3s_paper` with switches of its own
REORDERED = "fused3s+reorder"  # backend fused3s with reorder="auto", see `fused3s.graph.reorder.row_order`

SHAPE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})(?:/([1-9][0-9]{0,4}))?")  # heads x head dimension / KV heads
NO_EDGES = "none"
# Kinds of edge data: none, a bias of [nnz] or of [nnz, H], features of R columns with weights for keys and values
# (low_rank_R), T types with a vector each (types_T); the score terms of `bench.edge_inputs`; GATv2's score.
PLAIN_EDGES = (NO_EDGES, "bias", "bias_per_head", "column", "soft_cap", "gat", "gatv2")
NUMBERED_EDGES = {"low_rank": 16, "types": 256}  # with the largest number
NUMBERED = re.compile(rf"({'|'.join(NUMBERED_EDGES)})_([1-9][0-9]{{0,4}})")

DOORS = ("mesh", "weather", "driving", "relational")  # groups of users, see `bench.doors`
ONE_HEAD = ("1x64", "1x128", "1x256")
# Keys that a benchmark reads beside SHARED, with their defaults; ... has none.
SHARED = {"measure": ..., "source": "official", "root": "datasets", "batch_size": 1024}
_KERNELS = {"graphs": ..., "backends": ..., "shapes": ONE_HEAD, "repeats": 30, "scale": 1.0, "out_dtype": "float32"}
KEYS: dict[str, dict[str, Any]] = {
    "kernels": _KERNELS | {"plans": ("fixed",)},
    "codes": _KERNELS,
    "heads": _KERNELS | {"shapes": ..., "scale": "rsqrt_dim", "out_dtype": "input"},
    "edges": _KERNELS | {"shapes": ..., "edges": ..., "scale": "rsqrt_dim", "out_dtype": "input"},
    "backward": _KERNELS | {"shapes": ..., "scale": "rsqrt_dim", "out_dtype": "input"},
    "sm_active": _KERNELS,
    "end_to_end": {"graphs": ..., "modes": ..., "shapes": ONE_HEAD, "blocks": 10, "precisions": ("float16",)}
    | {"repeats": 10, "budget_ms": 50.0, "seed": 0},
    "layers": {"workloads": ..., "graphs": (), "shapes": ("8x16",), "blocks": 3}
    | {"precisions": ("float32", "autocast", "bfloat16"), "repeats": 3, "budget_ms": 150.0, "seed": 0}
    | {"pool": 8, "steps": 8, "launches": ("eager",)},
    "preprocessing": {"graphs": ..., "repeats": 10, "seconds": 2.0},
    "parallel": {"graphs": ..., "backends": ("fused3s",), "shapes": ("1x128",), "repeats": 30}
    | {"precisions": ("float16",), "method": "metis"}
    | {"launches": ("eager", "cuda_graph")},
    "peak_rates": {"repeats": 20},
    "stability": {},
    "doors": {"groups": DOORS, "size": "full", "repeats": 5, "seed": 0},
}
# Keys that change a value without being in its row: their hash is the row's `config_sha`.
SETTINGS = ("repeats", "budget_ms", "seconds", "seed", "scale", "pool", "steps", "size")

List = Field(max_length=1000, strict=False)  # YAML has lists and no tuples
Names = Annotated[tuple[str, ...], List]
Count = Annotated[int, Field(ge=1, le=10**9)]
Positive = Annotated[float, Field(gt=0, le=3.6e6, allow_inf_nan=False)]
# How the layers around attention are computed (runtime.dense); "+graph": replayed as a CUDA graph; "+compiled": each
# block with its attention by torch.compile.
Mode = Literal["plain", "compiled", "fused", "plain+graph", "compiled+graph", "fused+graph", "plain+compiled"]
LAUNCHES = {"": "eager", "graph": "cuda_graph", "compiled": "compiled"}  # the column of a row, by the end of a mode
Precision = Literal["float16", "bfloat16", "float32", "tf32", "autocast"]  # the last: bfloat16 over float32 weights


class Shape(NamedTuple):
    """Heads and columns of a head: "8x16"; "8x128/1" has 1 KV head, the head of k and v, for 8 query heads.

    Attributes:
        kv_heads: 0: as many as heads.
    """

    heads: int
    dim: int
    kv_heads: int = 0

    @property
    def width(self) -> int:
        """Columns of all heads."""
        return self.heads * self.dim

    @property
    def kv_width(self) -> int:
        """Columns of all KV heads."""
        return (self.kv_heads or self.heads) * self.dim

    def __str__(self) -> str:
        return f"{self.heads}x{self.dim}" + (f"/{self.kv_heads}" if self.kv_heads else "")

    @classmethod
    def of(cls, text: str) -> "Shape":
        match = SHAPE.fullmatch(text)
        if not match or int(match[2]) > MAX_HEAD_DIM:
            raise ValueError(
                f"shapes: got {text!r}; heads x head dimension is needed, such as 8x16, up to {MAX_HEAD_DIM} columns"
            )
        shape = cls(int(match[1]), int(match[2]), int(match[3] or 0))
        if shape.kv_heads and (shape.kv_heads == shape.heads or shape.heads % shape.kv_heads):
            raise ValueError(f"shapes: got {text!r}; KV heads must be a divisor of the heads, and fewer")
        return shape


class Workload(Section):
    """Inputs of a training step of `bench.layers`: a whole graph, the same in every step; or in every step another
    batch of small graphs; or in every step other seeds with sampled neighbours, one bipartite block for each layer."""

    graph: str = Field(min_length=1)  # data set
    layer: Literal["transformer", "gat", "gatv2"] = "transformer"  # of PyG, and ours in its place
    edge_dim: int | None = Field(default=None, ge=1)  # columns of edge features, random numbers
    batch: Count | None = None  # small graphs of a step
    seeds: Count | None = None
    # Neighbours that are drawn for each node, with replacement and without repeated edges; the seeds' come first, as
    # in PyG. One for each layer.
    fan_out: Annotated[tuple[Count, ...], List] = ()
    captured: bool = False  # also timed: our step as one CUDA graph, see `bench.captured_loop`
    inference: bool = False  # a step is a forward pass without gradients

    @property
    def is_new(self) -> bool:
        """Whether each step gets another graph."""
        return self.batch is not None or self.seeds is not None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        check_label("graph", self.graph)
        if (self.seeds is None) != (not self.fan_out):
            raise ValueError(f"got seeds = {self.seeds} and fan_out = {[*self.fan_out]}; one needs the other")
        if self.batch and self.seeds:
            raise ValueError(f"got batch = {self.batch} and seeds = {self.seeds}; one of the two is allowed")
        if self.captured and not self.is_new:
            raise ValueError("captured = true: batch or seeds are needed with it; a whole graph has one size")
        if self.captured and self.inference:
            raise ValueError("captured = true and inference = true: one of the two is allowed")
        return self


class BenchConfig(Section):
    """See KEYS for the defaults, which depend on the benchmark."""

    measure: Literal[tuple(KEYS)]
    graphs: Names = ()  # data sets; of layers the workloads to measure, none for all
    source: Literal["auto", "official", "file", "synthetic"]  # no measurement is of a surrogate unless asked for
    root: str = Field(min_length=1)  # of data sets; relative to the current directory
    batch_size: Count  # graphs of a collection
    # Of `baselines.REGISTRY`; of kernels also SWITCHES and REORDERED. The type of the inputs is `Backend.computes_in`.
    backends: Names = ()
    shapes: Names = ()  # heads x head dimension; the width of a model is their product
    edges: Names = (NO_EDGES,)  # kinds of edge data
    out_dtype: Literal["float32", "float16", "input"] = "float32"  # input: the type that the backend computes in
    # fixed: the sparse format is built once. rebuilt: at each call, from the CSR arrays on the GPU.
    plans: Annotated[tuple[Literal["fixed", "rebuilt"], ...], List] = ("fixed",)
    modes: dict[str, Annotated[tuple[Mode, ...], List]] = Field(default={})  # ways to run a model, by backend
    blocks: int = Field(
        default=0, ge=0, le=1000
    )  # of the model; of layers, workloads with samples have as many as those
    precisions: Annotated[tuple[Precision, ...], List] = ()  # of the layers outside attention
    workloads: dict[str, Workload] = Field(default={})
    method: Literal["metis", "contiguous"] = "metis"  # of partitions, which are kept below root/parts
    # Of passes of several ranks: eager, cuda_graph. Of steps of layers: eager, compiled, reduce_overhead.
    launches: Annotated[tuple[Literal["eager", "cuda_graph", "compiled", "reduce_overhead"], ...], List] = ()
    groups: Annotated[tuple[Literal[DOORS], ...], List] = ()  # of DOORS
    size: Literal["full", "small"] = "full"  # of their inputs; small: those that outputs are checked with
    repeats: int = Field(default=1, ge=1, le=10**6)  # timed intervals, passes of a round, or calls; fewer of long ones
    budget_ms: Positive = 1.0  # of a round of passes, or of a row of steps: fewer of slow ones
    seconds: Positive = 1.0  # a call is not repeated after this time
    pool: int = Field(default=2, ge=2, le=1000)  # batches that are drawn before timing; steps take them in turn
    steps: Count = 1  # most steps in a row, between two synchronisations
    seed: int = Field(default=0, ge=0, lt=2**63)
    # Factor of the scores: 1 in the paper; rsqrt_dim is 1/sqrt(head dimension), as in models.
    scale: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)] | Literal["rsqrt_dim"] = "rsqrt_dim"

    @model_validator(mode="before")
    @classmethod
    def _keys_of_the_benchmark(cls, given: Any) -> Any:
        """Fill in the defaults of the benchmark, and refuse keys that it does not read."""
        known = KEYS.get(given.get("measure")) if isinstance(given, dict) else None
        if known is None:
            return given
        known = SHARED | known
        unknown = [(name, did_you_mean(str(name), [*known])) for name in given if name not in known]
        problems = [f"{name}: no such key{hint and ';' + hint}" for name, hint in unknown]
        problems += [f"{name} is missing" for name, default in known.items() if default is ... and name not in given]
        if problems:
            raise ValueError(f"{'; '.join(problems)}; measure = {given['measure']!r} reads {', '.join(known)}")
        return {name: default for name, default in known.items() if default is not ...} | given

    @model_validator(mode="after")
    def _values_known(self) -> Self:
        import data  # on use: `import configs` stays light
        from bench.baselines import REGISTRY

        wanted = [workload.graph for workload in self.workloads.values()] or self.graphs
        for name in wanted:
            check_label("graphs", name)
            if self.source != "file":
                check_choice(
                    "graphs", name, tuple(data.names()), "; a file of your own has any name, with source: file"
                )
        for name in self.graphs if self.workloads else ():
            check_choice("graphs", name, tuple(self.workloads))
        extra = {"kernels": (*SWITCHES, REORDERED), "sm_active": tuple(SWITCHES)}.get(self.measure, ())
        allowed = extra if self.measure == "sm_active" else (*REGISTRY, *extra)
        if self.measure == "parallel":
            allowed = [name for name, backend in REGISTRY.items() if backend.writes_lse]
        some = ("bfloat16", "float32", *{"layers": ("tf32", "autocast"), "end_to_end": ("tf32",)}.get(self.measure, ()))
        launches = {"parallel": ("eager", "cuda_graph"), "layers": ("eager", "compiled", "reduce_overhead")}
        for key, values, known in (
            ("backends", self.backends, allowed),
            ("modes", self.modes, allowed),
            ("precisions", self.precisions, some if self.measure == "layers" else ("float16", *some)),
            ("launches", self.launches, launches.get(self.measure, ())),
        ):
            for value in values:
                check_choice(key, value, known)
        for kind in self.edges:
            name, number = edge_kind(kind)
            if not (name in PLAIN_EDGES if number is None else number <= NUMBERED_EDGES[name]):
                numbered = [f"{name}_1 to {name}_{most}" for name, most in NUMBERED_EDGES.items()]
                raise ValueError(f"edges: got {kind!r}; allowed are {', '.join([*PLAIN_EDGES, *numbered])}")
        for name, workload in self.workloads.items():
            if workload.batch and workload.batch > self.batch_size:
                raise ValueError(
                    f"workloads.{name}.batch = {workload.batch}: only batch_size = {self.batch_size} are loaded"
                )
        for key, values in self:
            if isinstance(values, tuple) and len({*values}) < len(values):
                raise ValueError(f"{key} = {[*values]}: an entry is given twice; once is allowed")
        if self.measure != "heads" and (wrong := [str(shape) for shape in self.head_shapes if shape.kv_heads]):
            raise ValueError(f"shapes: got {wrong[0]!r}; fewer KV heads are for measure = heads")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Graphs, or workloads, in the order of the file."""
        return tuple(name for name in self.workloads if name in self.graphs or not self.graphs) or self.graphs

    def graph_of(self, name: str) -> str:
        """Data set of a graph or workload."""
        return self.workloads[name].graph if name in self.workloads else name

    @property
    def head_shapes(self) -> tuple[Shape, ...]:
        return tuple(Shape.of(shape) for shape in self.shapes)

    def scale_of(self, dim: int) -> float:
        """Factor of the scores of heads of `dim` columns."""
        return dim**-0.5 if self.scale == "rsqrt_dim" else self.scale

    def load(self, name: str, features: bool) -> "LoadedGraph":
        """A graph; kernels read no features. Errors are those of `data.load`."""
        import data

        return data.load(name, root=self.root, source=self.source, batch_size=self.batch_size, features=features)

    @property
    def used(self) -> dict[str, Any]:
        """The keys that the benchmark reads."""
        return {name: getattr(self, name) for name in SHARED | KEYS[self.measure]}

    @property
    def settings_sha(self) -> str:
        """Hash of the settings of the measurement, which are in no column of a row."""
        return digits({"values": {name: getattr(self, name) for name in SETTINGS if name in KEYS[self.measure]}})


def edge_kind(kind: str) -> tuple[str, int | None]:
    """Name and number of a kind of edge data: ("low_rank", 11) of "low_rank_11", ("bias", None) of "bias"."""
    match = NUMBERED.fullmatch(kind)
    return (match[1], int(match[2])) if match else (kind, None)
