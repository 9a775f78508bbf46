"""A loop over batches of different sizes as one CUDA graph.

    def step(batch):                          # ordinary code
        optimiser.zero_grad()
        out = model(batch.x, batch.edge_index, batch.batch, batch.num_graphs)
        loss = cross_entropy(out, batch.y)    # ignores -100, the label of padding
        loss.backward()
        optimiser.step()
        return loss.detach()

    loop = CapturedLoop(step, model, optimiser, samples=loader)
    losses = [loop(batch) for batch in loader]

Padding comes after the rows of a batch. Its edges connect only padding nodes, so to a layer it is one more graph.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from .captured_step import State, capture_step, checked_device, copy_padded_, map_nested, restored
from .runtime.cuda_graph import CaptureError
from .torch_side.torch_private import DispatchMode

logger = logging.getLogger(__name__)

NODES, GRAPHS = "num_nodes", "num_graphs"  # numbers that are sizes
IGNORED = -100  # label that torch's cross_entropy ignores
PADDING_IDS = 64  # ids of padding are spread over a multiple of so many rows
ALLOWED_ERROR = 1e-2  # between a step without padding and one of which a fifth or more is padding
NO_WAITS = (
    "A step must not wait for the GPU: no .item(), print or boolean index; sizes from the batch, as in "
    "global_mean_pool(x, batch.batch, batch.num_graphs); optimisers with capturable=True"
)
CAUSES = (
    "Usual causes: a loss over all rows (give padding an ignored label by padding=, or weight rows by "
    "batch.is_real(name)), a mean or sum over all nodes (pool by batch.batch), BatchNorm over nodes or graphs (take "
    "LayerNorm); or a result of rows that are no nodes, edges or graphs in its first dimension"
)


class CapturedLoop:
    """A step that is captured in a CUDA graph and replayed for each batch; on a CPU, called with the same padding.

    The step gets a batch of fixed size, a PyG `Data` or `Batch` or a dictionary, as the samples are:

    * Padding rows are 0; in integers named `y` they are -100, which `cross_entropy` ignores; in masks False.
    * Tensors with `index` in their name, [2, E] or [K], hold node ids; their padding holds ids of padding nodes. So
      does that of `batch`.
    * `batch.is_real(name)`, in a dictionary `batch["is_real"](name)`: bool, False for the padding rows of a tensor; for
      losses without an ignored label: `(error * real).sum() / real.sum()`.
    * `num_nodes` and `num_graphs` are integers that count padding, too. All other numbers are tensors []: the seeds of
      NeighborLoader are `torch.arange(batch.num_nodes, device=device) < batch.batch_size`.
    * Names that end in `ptr`, and values that are neither tensors nor numbers, are left out.

    A batch that does not fit is captured anew at a larger size, with a warning in the log; the old memory is freed
    first. Each layer plans the edges of a batch; `plan = conv.plan(batch.edge_index, batch.num_nodes)` in the step
    serves all layers of the same heads.

    Args:
        step: takes a batch, only queues work on the GPU, and returns a tensor, a tuple, list or dictionary of tensors,
            or None. For evaluation: without optimiser, under torch.no_grad().
        model, states: see `capture_step`.
        samples: batches on any device, such as the loader, which is iterated once. Their largest sizes and a tenth more
            are the fixed size. Tensors with one row for each node, edge or graph, or with different lengths, are
            padded; all others keep their shape. Mappings have nodes in the rows of `x`, or the number `num_nodes`; with
            a vector `batch` they need the number `num_graphs`.
        padding: by name, a value for rows of padding; or another name, for ids of padding rows of that tensor.

    Raises:
        TypeError: `step` is no function, or a state, a sample or the result has an unsupported type.
        ValueError: there are no samples, or they have different names; or padding changes a buffer, the result or a
            gradient. Eager steps on the smallest sample detect that, if necessary with constants in place of random
            numbers. Weights, states and torch's generators are restored.
        CaptureError: as of `capture_step`.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        model: nn.Module,
        *states: State,
        samples: Iterable[Any],
        padding: Mapping[str, float | str] | None = None,
    ) -> None:
        if not callable(step):
            raise TypeError(f"step: got {type(step).__name__}; a function of a batch is needed")
        self._device = checked_device(model, states)
        self._step, self._model, self._states = step, model, states
        with torch.random.fork_rng([]):  # a loader draws an order
            self._layout, most, smallest = _layout_of(samples, dict(padding or {}))
        self._result_groups = None
        with suppress(ValueError):  # perhaps of random numbers, which depend on the number of rows
            self._result_groups = self._check_padding(smallest, nullcontext())
        if self._result_groups is None:
            self._result_groups = self._check_padding(smallest, _ConstantRandomNumbers())
        self._most, self._room, self._graph = most, None, None
        self._begin(smallest, most)

    def __call__(self, batch: Any) -> Any:
        """The step's result for a batch, in new tensors without padding rows.

        Args:
            batch: on any device, with the names, types and columns of the samples.

        Raises:
            TypeError, ValueError: it is another kind of batch; the text names the tensor.
            CaptureError: the batch does not fit, and the step cannot be captured for it; or an optimiser's number, such
                as lr, has changed.
        """
        tensors, used = self._layout.read(batch)
        if self._room is None or any(length > self._room.most[group] for group, length in used.items()):
            most = {group: max(length, used[group]) for group, length in self._most.items()}
            logger.warning("CapturedLoop: a batch does not fit; captured anew for %s, before %s", most, self._most)
            self._begin(batch, most)
        if (now := self._optimiser_numbers()) != self._numbers:
            changed = dict(each for each in now if each not in self._numbers)
            raise CaptureError(
                f"optimiser: since the capture, which keeps numbers, got {changed}. Give it tensors, which schedulers "
                "change in place, such as lr=torch.tensor(0.1); or make a new loop"
            )
        self._room.load(tensors, used)
        result = self._step(self._room.batch()) if self._graph is None else self._graph.replay()
        groups = iter(self._result_groups)

        def own(tensor: Tensor) -> Tensor:
            group = next(groups)
            return (tensor if group is None else tensor[: used[group]]).detach().clone()

        return map_nested(own, result)

    def _begin(self, batch: Any, most: dict[str, int]) -> None:
        """Make room for batches of `most` rows and a tenth more, and capture the step on `batch` there."""
        self._room = self._graph = None  # their memory is free for the new ones
        room = _Room(self._layout, batch, {group: 1 + rows + rows // 10 for group, rows in most.items()}, self._device)
        graph, step = None, self._step  # the graph references the step alone: both are freed without a gc
        if self._device.type == "cuda":
            try:
                graph = capture_step(lambda: step(room.batch()), self._model, *self._states)
            except CaptureError as error:
                raise CaptureError(f"{error}\n{NO_WAITS}") from error
        self._most, self._room, self._graph, self._numbers = most, room, graph, self._optimiser_numbers()

    def _optimiser_numbers(self) -> list[tuple[str, Any]]:
        """Options of optimisers that a CUDA graph keeps."""
        optimisers = (each for each in self._states if isinstance(each, torch.optim.Optimizer))
        groups = (group for each in optimisers for group in each.param_groups)
        options = (item for group in groups for item in group.items())
        return [(name, value) for name, value in options if isinstance(value, (float, tuple)) and name != "initial_lr"]

    def _check_padding(self, sample: Any, mode: AbstractContextManager[Any]) -> list[str | None]:
        """Compare an eager step on the sample with one on the padded sample.

        Returns:
            For each tensor of the result, the group that its rows are.
        """
        _, used = self._layout.read(sample)
        more = {group: 1 + nth + rows + rows // 4 for nth, (group, rows) in enumerate(used.items())}
        exact = _Room(self._layout, sample, used, self._device, pads=False)
        padded = _Room(self._layout, sample, more, self._device)
        (results, *expected), (others, *found) = (self._observe(room, mode) for room in (exact, padded))
        # No two groups have both lengths in common, because of `nth`.
        of_lengths = {(rows, padded.lengths[group]): group for group, rows in used.items()}
        groups = []
        for (name, result), other in zip(results.items(), others.values(), strict=True):
            is_cut = result.shape != other.shape and result.dim() == other.dim()
            groups.append(of_lengths.get((len(result), len(other))) if is_cut else None)
            if groups[-1]:
                others[name] = other[: len(result)]
        for one, other in zip((*expected, results), (*found, others), strict=True):
            _compare(one, other)
        return groups

    def _observe(self, room: "_Room", mode: AbstractContextManager[Any]) -> tuple[dict[str, Tensor], ...]:
        """Result, buffers and gradients of a step whose changes are undone, by the names that errors use."""
        parameters = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        before, gradients, hooks = [each.grad for each in parameters.values()], {}, []
        try:
            for name, parameter in parameters.items():
                parameter.grad = None

                def keep(parameter: Tensor, name: str = f"the gradient of {name}") -> None:
                    gradients[name] = parameter.grad.clone()

                hooks.append(parameter.register_post_accumulate_grad_hook(keep))
            with restored([self._model, *self._states], self._device, captures=False), mode:
                result = self._step(room.batch())
                buffers = {f"the buffer {name}": each.clone() for name, each in self._model.named_buffers()}
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, gradient in zip(parameters.values(), before, strict=True):
                parameter.grad = gradient
        return dict(_named_results(result, "the result")), buffers, gradients


class _Layout:
    """How the tensors of a batch are padded.

    Args:
        sample: gives types and columns.
        rows: lengths in all samples, by name.
        padding: as of `CapturedLoop`.

    Attributes:
        groups: for each name that is padded: the first name with the same length in every sample.
        padding: for each padded tensor: a value; or a group, and padding is ids of its padding rows.
    """

    def __init__(self, sample: Any, rows: dict[str, list[int]], padding: dict[str, float | str]) -> None:
        (tensors, _), first = _read(sample), {}
        if unknown := padding.keys() - tensors.keys():
            raise ValueError(f"padding: got {sorted(unknown)}; the samples have tensors {sorted(tensors)}")
        groups = {name: first.setdefault(tuple(lengths), name) for name, lengths in rows.items()}
        sizes = {NODES, GRAPHS, *padding.values(), *(name for name in rows if "index" in name)}
        padded = {groups[name] for name, lengths in rows.items() if name in sizes or len(set(lengths)) > 1}
        self.groups = {name: group for name, group in groups.items() if group in padded}
        self.padding, with_rows = {}, {GRAPHS, *padding.values(), *(self.groups.get(name) for name in tensors)}
        for name, tensor in tensors.items():
            value = padding.get(name, _usual_padding(name, tensor))
            if name not in self.groups:
                continue
            if isinstance(value, str) and not (value in self.groups and value in with_rows):
                raise ValueError(
                    f"padding of {name}: ids of {value}, and no tensor has as many rows, or its number is not known. A "
                    "mapping needs x or num_nodes, and num_graphs with a vector batch; or take ids of another tensor's "
                    f"rows, padding={{{name!r}: NAME}}: {sorted(self.groups)}"
                )
            self.padding[name] = self.groups[value] if isinstance(value, str) else value
        self._specs = {name: self._spec(name, tensor) for name, tensor in tensors.items()}

    def read(self, batch: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The tensors of a batch, and the length of each group.

        Raises:
            TypeError, ValueError: the batch is not as the samples; the text names the tensor.
        """
        tensors, rows = _read(batch)
        if tensors.keys() != self._specs.keys():
            raise ValueError(f"batch: got tensors {sorted(tensors)}; the samples have {sorted(self._specs)}")
        for name, tensor in tensors.items():
            if (got := self._spec(name, tensor)) != self._specs[name]:
                raise ValueError(
                    f"{name}: got {got}; the samples have {self._specs[name]}, where None is padded. A length that "
                    "differs between batches must differ between samples"
                )
        for name, group in self.groups.items():
            if rows[name] != rows[group]:
                raise ValueError(
                    f"{name}: got length {rows[name]}, and {group} has {rows[group]}; in each sample the two are the "
                    "same: give samples in which they differ"
                )
        return tensors, {group: rows[group] for group in self.groups.values()}

    def _spec(self, name: str, tensor: Tensor) -> tuple[torch.dtype, tuple[int | None, ...]]:
        shape: list[int | None] = [*tensor.shape]
        if name in self.groups:
            shape[_row_dim(name)] = None
        return tensor.dtype, tuple(shape)


class _Room:
    """A padded batch in tensors that keep their addresses.

    Args:
        batch: the first that is loaded.
        most: the most rows of a batch, by group.
        pads: False: there is room for `most` rows, and none for padding.

    Attributes:
        lengths: of the tensors, by group.
    """

    def __init__(
        self, layout: _Layout, batch: Any, most: dict[str, int], device: torch.device, pads: bool = True
    ) -> None:
        self.most, self._layout = most, layout
        tensors, used = layout.read(batch)
        self._num_ids = dict.fromkeys(most, 0)
        for name, group in layout.padding.items() if pads else ():
            if isinstance(group, str):
                rows = most[layout.groups[name]] if tensors[name].dim() == 2 else 0
                self._num_ids[group] = max(self._num_ids[group], _num_ids(rows))
        self.lengths = {group: rows + self._num_ids[group] for group, rows in most.items()}
        self._used = torch.zeros(len(most), dtype=torch.int64, device=device)
        self._tensors, self._padding = {}, {}
        for name, tensor in tensors.items():
            shape = [*tensor.shape]
            if name in layout.groups:
                shape[_row_dim(name)] = self.lengths[layout.groups[name]]
            self._tensors[name] = torch.zeros(shape, dtype=tensor.dtype, device=device)
            padding = layout.padding.get(name)
            self._padding[name] = self._ids(name, padding) if isinstance(padding, str) else padding
        self._empty = {} if isinstance(batch, Mapping) else copy.copy(batch)
        for name in () if isinstance(batch, Mapping) else batch.to_dict():
            del self._empty[name]
        self.load(tensors, used)

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], used: dict[str, int]) -> None:
        """Queue copies of a batch from `_Layout.read`."""
        self._used.copy_(torch.tensor([used[group] for group in self.lengths]), non_blocking=True)
        for name, tensor in tensors.items():
            target, padding = self._tensors[name], self._padding[name]
            if padding is None:
                target.copy_(tensor, non_blocking=True)
            else:
                copy_padded_(*(each.movedim(_row_dim(name), 0) for each in (target, tensor)), padding)

    def batch(self) -> Any:
        """The batch for a step. Ids are copied: layers keep the plan of ids that stay through a capture."""
        found = copy.copy(self._empty)
        for name, tensor in self._tensors.items():
            found[name] = tensor.clone() if _row_dim(name) else tensor.detach()
        found["is_real"] = self._is_real
        for name in (NODES, GRAPHS):
            if name in self._layout.groups:
                found[name] = self.lengths[self._layout.groups[name]]
                if name == GRAPHS and not isinstance(found, dict):
                    found._num_graphs = found[GRAPHS]  # attribute of a PyG Batch
        return found

    def _is_real(self, name: str) -> Tensor:
        if name not in self._layout.groups:
            raise ValueError(f"is_real: got {name!r}; padded are {sorted(self._layout.groups)}")
        group = self._layout.groups[name]
        rows = torch.arange(self.lengths[group], device=self._used.device)
        return rows < self._used[[*self.lengths].index(group)]

    def _ids(self, name: str, group: str) -> Tensor:
        """Ids of padding rows of a group for each row of a tensor of ids: ascending, or different pairs."""
        tensor, count = self._tensors[name].movedim(_row_dim(name), 0), max(1, self._num_ids[group])
        row = torch.arange(len(tensor), device=tensor.device)
        ids = (
            row * count // max(1, len(row))
            if tensor.dim() == 1
            else torch.stack([row % count, row // count % count], 1)
        )
        return (self.lengths[group] - count + ids).to(tensor.dtype)


def _num_ids(pairs: int) -> int:
    """Rows that so many edges of padding join, each pair at most once: repeated edges, and rows of very many, would
    take the GPU longer than the batch."""
    return PADDING_IDS * math.ceil(math.sqrt(pairs + PADDING_IDS) / PADDING_IDS)


class _ConstantRandomNumbers(DispatchMode):
    """Random numbers are constants, and dropout keeps all, so that steps on batches of two sizes can be compared."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.native_dropout.default:
            return arguments[0].clone(), torch.ones_like(arguments[0], dtype=torch.bool)
        found = function(*arguments, **(options or {}))
        if torch.Tag.nondeterministic_seeded in function.tags and isinstance(found, Tensor):
            found.fill_(0.5 if found.is_floating_point() else 0)
        return found


def _layout_of(samples: Iterable[Any], padding: dict[str, float | str]) -> tuple[_Layout, dict[str, int], Any]:
    """The layout, the most rows of each group, and the smallest sample."""
    smallest, least, lengths = None, math.inf, {}
    for sample in samples:
        _, rows = _read(sample)
        lengths = lengths or {name: [] for name in rows}
        if rows.keys() != lengths.keys():
            raise ValueError(f"samples: got one with {sorted(rows)}, and one with {sorted(lengths)}")
        for name, length in rows.items():
            lengths[name].append(length)
        if sum(rows.values()) < least:
            least, smallest = sum(rows.values()), sample
    if smallest is None:
        raise ValueError("samples: got none; at least one batch is needed, such as those of the loader")
    layout = _Layout(smallest, lengths, padding)
    return layout, {group: max(lengths[group]) for group in layout.groups.values()}, smallest


def _read(batch: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The tensors of a batch by name, numbers among them; and the length of each, with the numbers of nodes and of
    graphs where the batch tells them.

    Raises:
        TypeError: it is no batch.
    """
    is_mapping, values = isinstance(batch, Mapping), batch
    if not is_mapping:
        values = batch.to_dict() if callable(getattr(batch, "to_dict", None)) else {}
    tensors = {
        name: torch.as_tensor(value)
        for name, value in values.items()
        if isinstance(value, (Tensor, int, float)) and name not in (NODES, GRAPHS) and not name.endswith("ptr")
    }
    if not tensors:
        raise TypeError(f"batch: got {type(batch).__name__}; a PyG Data or Batch, or a mapping to tensors, is needed")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: got {tensor.layout}, which has no rows to pad; an edge_index is needed")
    sizes = {name: batch.get(name) if is_mapping else getattr(batch, name, None) for name in (NODES, GRAPHS)}
    if sizes[NODES] is None and "x" in tensors:
        sizes[NODES] = len(tensors["x"])
    rows = {name: number for name, number in sizes.items() if number is not None}
    return tensors, rows | {name: each.shape[_row_dim(name)] for name, each in tensors.items() if each.dim()}


def _row_dim(name: str) -> int:
    """As in PyG."""
    return -1 if "index" in name else 0


def _usual_padding(name: str, tensor: Tensor) -> float | str:
    if "index" in name:
        return NODES
    if name == "batch" or name.endswith("_batch"):
        return GRAPHS
    return IGNORED if name == "y" and tensor.dtype.is_signed and not tensor.is_floating_point() else 0


def _named_results(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a result, in the order of `map_nested`.

    Raises:
        TypeError: it holds other values.
    """
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif type(value) in (tuple, list, dict):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _named_results(each, f"{name}[{key!r}]")
    elif value is not None:
        raise TypeError(f"step: {name} is {type(value).__name__}; a CUDA graph computes tensors alone")


def _compare(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Raise a ValueError for the first tensor that differs, where the expected one is finite. A gradient is compared
    with the norm of all: it may be nothing but rounding."""
    finite = {name: each.isfinite() for name, each in expected.items()}
    norms = {name: each[finite[name]].double().norm().item() for name, each in expected.items()}
    for name in expected | found:
        error, allowed = math.inf, ALLOWED_ERROR
        if name in expected and name in found and expected[name].shape == found[name].shape:
            one, other = (each[name][finite[name]] for each in (expected, found))
            allowed = max(allowed, 8 * torch.finfo(one.dtype).eps) if one.is_floating_point() else allowed
            norm = math.hypot(*norms.values()) if "gradient" in name else norms[name]
            error = (other.double() - one.double()).norm().item() / (norm or 1)
        if not error <= allowed:  # NaN, too
            raise ValueError(
                f"step: padding changes {name}, by {error:.1e} of its norm; {allowed:.1e} is allowed. {CAUSES}"
            )
