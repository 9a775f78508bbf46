"""Edge data: terms that each edge adds to its score, key and value.

For an edge (i, j) of A and a head h, with all terms optional:

    k_ij = w_ij * k_j + W a_ij                                        elementwise; W: key_weight
    w_ij = w[type_ij], or sum_r a_ijr w_r                             w: type_weight; key_factor
    v_ij = v_j + W' a_ij                                              W': value_weight
    s_ij = clamp(f(scale * m_ij * <q_i, k_ij> + b_ij), -c, c)         m: multiplier, b: bias, f: score, c: clamp
    O_i  = sum_j softmax_j(s_ij) v_ij

Multiplier, bias, f and clamp are one expression for backends (`score_term`).

With a: additive_weight, <a, leaky_relu(q_i + k_ij)> takes the place of <q_i, k_ij>.

No [nnz, H, d] tensor is needed: <q_i, W a_ij> = <W^T q_i, a_ij> and sum_j p_ij W' a_ij = W' sum_j p_ij a_ij.

`EdgeData` holds the caller's tensors in the caller's edge order (`graph.edge_order`). `AttentionPlan.bind_edges`
checks them and sorts them into CSR order: `BoundEdges`, the argument of backends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn import functional

from ..arguments import DTYPES, check_dense, finite_number
from ..graph.edge_order import EdgeOrder
from ..runtime.gather_rows import gather_rows
from .dropout import Dropout
from .score_source import KINDS
from .score_term import ScoreTerm, bind_score, score_of

FEATURE_STEP = 16  # kernels read features in steps of so many columns: one k-step of the tensor cores
MAX_TYPES = 256  # T: a type is a byte
VALUE_NAMES = {kind: f"values of {kind}s" for kind in KINDS} | {"edge": "bias, multiplier or values of edges"}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class EdgeData:
    """Data of the edges of a graph and their weights, on the plan's device; all optional.

    For an edge (i, j) with features a_ij, type t_ij, multiplier m_ij and bias b_ij:

        k_ij = w_ij * k_j + key_weight a_ij
        w_ij = type_weight[t_ij], or sum_r a_ijr key_factor[r], or 1
        v_ij = v_j + value_weight a_ij
        s_ij = clamp(f(scale * m_ij * <q_i, k_ij> + b_ij), -c, c)
        O_i  = sum_j softmax_j(s_ij) v_ij

    Tensors of edges are in the graph's edge order: edge ids of a DGLGraph; columns of an edge_index; stored entries of
    torch.sparse tensors, (indptr, indices) and SciPy CSR; `tocoo()` for any other SciPy format. E counts
    repeated edges, each with its own data.

    Attributes:
        bias: [E] or [E, H], q's type, added to the scaled score. -inf gives weight 0, unless there is a clamp.
        multiplier: [E] or [E, H], q's type, factor of the scaled score, before the bias.
        features: [E, r], q's type, r >= 1: a_ij; multiplied by `key_weight`, `value_weight` and `key_factor`.
        types: [E] integers, 0 <= type < T <= 256: the row of `type_weight` that multiplies the key.
        key_weight, value_weight: [H, d, r], q's type; H = 1 if q has two dimensions.
        type_weight: [T, H, d], q's type: one vector per edge type, multiplied elementwise.
        key_factor: [r, H, d], q's type: one vector per feature, whose sum multiplies the key elementwise. Not with
            types, which are features of one 1 and 0 elsewhere.
        clamp: c > 0; scores are clamped to [-c, c] after bias and score term. Needs no other edge data.
        additive_weight: [H, d], q's type: a of additive attention, as in GATv2: <a, leaky_relu(q_i + k_ij)> takes the
            place of <q_i, k_ij>. Not with type_weight or key_factor.
        additive_slope: slope of that leaky ReLU below 0.
        score: f, any function of the score and of values by row, column, edge and head, after the bias.
    """

    bias: torch.Tensor | None = None
    multiplier: torch.Tensor | None = None
    features: torch.Tensor | None = None
    types: torch.Tensor | None = None
    key_weight: torch.Tensor | None = None
    value_weight: torch.Tensor | None = None
    type_weight: torch.Tensor | None = None
    clamp: float | None = None
    score: ScoreTerm | None = None
    additive_weight: torch.Tensor | None = None
    additive_slope: float = 0.2
    key_factor: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class BoundEdges:
    """Checked edge data of one plan in CSR order; the result of `AttentionPlan.bind_edges`.

    `dataclasses.replace(bound, key_weight=...)` changes weights without binding the edges again; a call refuses other
    types, and other fields that kernels would read past their ends.

    Attributes:
        order: edge order of its plan; the plan's shape if nothing here belongs to an edge.
        padded_features: [nnz, `padded_columns(r)`], zero from column r on.
        types: [nnz] uint8.
        num_features: r; 0 without features.
        key_weight, value_weight, type_weight, key_factor, additive_weight, additive_slope: as in `EdgeData`, checked at
            each call.
        row_values, column_values, head_values: of the score term, [num_rows, 1 or H, n], [num_cols, 1 or H, n] and
            [1, 1 or H, n] float32.
        edge_values: [nnz, 1 or H, n].
        score, score_numbers: the normalised expression of the score term, with multiplier, bias and clamp, and its
            numbers.
        dropout: dropout of the call, set at each call.
        checked_types: `types` as they were checked, and the largest plus 1; None without types.
        checked_score: the `score_shape` that was checked; None without a score term.
    """

    order: EdgeOrder | tuple[int, int] | None = None
    padded_features: torch.Tensor | None = None
    types: torch.Tensor | None = None
    num_features: int = 0
    key_weight: torch.Tensor | None = None
    value_weight: torch.Tensor | None = None
    type_weight: torch.Tensor | None = None
    key_factor: torch.Tensor | None = None
    dropout: Dropout | None = None
    row_values: torch.Tensor | None = None
    column_values: torch.Tensor | None = None
    edge_values: torch.Tensor | None = None
    head_values: torch.Tensor | None = None
    score: str | None = None
    score_numbers: tuple[float, ...] = ()
    additive_weight: torch.Tensor | None = None
    additive_slope: float = 0.2
    checked_types: tuple[torch.Tensor, int] | None = None
    checked_score: tuple[Any, ...] | None = None

    @property
    def features(self) -> torch.Tensor | None:
        """[nnz, r], a view of `padded_features`."""
        return None if self.padded_features is None else self.padded_features[:, : self.num_features]

    def to(self, dtype: torch.dtype) -> "BoundEdges":
        """The same with all float tensors of this type; those of WIDE have at least float32."""
        wide = torch.promote_types(dtype, torch.float32)
        given = {name: getattr(self, name) for name in FLOATS}
        types = {name: wide if name in WIDE else dtype for name in FLOATS}
        return replace(self, **{name: each.to(types[name]) for name, each in given.items() if each is not None})

    def with_wide_values(self, dtype: torch.dtype) -> "BoundEdges":
        """The same with the tensors of WIDE in the type that they have where q has `dtype`."""
        if self.score is None:
            return self
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        wrong = {}
        for name in WIDE:
            values = getattr(self, name)
            if values is not None and values.dtype != wide:
                wrong[name] = values.to(wide)
        return replace(self, **wrong) if wrong else self

    def values(self) -> tuple[torch.Tensor | None, ...]:
        """Values of rows, columns, edges and heads."""
        return self.row_values, self.column_values, self.edge_values, self.head_values

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors, in the order of TENSORS, then the seed of the dropout; None for absent ones."""
        floats = self.padded_features, self.key_weight, self.value_weight, self.type_weight, self.key_factor
        seed = None if self.dropout is None else self.dropout.seed
        return (*floats, *self.values(), self.additive_weight, self.types, seed)

    def with_tensors(self, tensors: Sequence[torch.Tensor | None]) -> "BoundEdges":
        """The same with `tensors()` replaced."""
        *tensors, seed = tensors
        dropout = None if seed is None else Dropout(self.dropout.rate, seed)
        return self.changed(dropout=dropout, **dict(zip(TENSORS, tensors, strict=True)))

    def changed(self, **fields: Any) -> "BoundEdges":
        """`dataclasses.replace`, which costs as much as a launch."""
        if torch.compiler.is_compiling():
            return replace(self, **fields)
        new = object.__new__(BoundEdges)
        vars(new).update(vars(self), **fields)
        return new


NOTHING_BOUND = BoundEdges()  # to be `changed`

# The only lists of the fields, by use:
VALUES = ("row_values", "column_values", "edge_values", "head_values")  # in the order of KINDS
WIDE = ("row_values", "column_values", "head_values")  # float32, but float64 where q is
FLOATS = (  # with gradients
    *("padded_features", "key_weight", "value_weight", "type_weight", "key_factor"),
    *(*VALUES, "additive_weight"),
)
TENSORS = (*FLOATS, "types")


def bind(
    data: EdgeData,
    order: EdgeOrder | None,
    shape: tuple[int, int],
    device: torch.device,
    check_values: bool = True,
) -> BoundEdges:
    """Check edge data and sort it into CSR order.

    Args:
        data: on `device`.
        order: edge order of the graph; None if the plan keeps none: `data` has nothing that belongs to an edge.
        check_values: whether to check for NaN and infinities, which waits for the GPU. Types are always checked:
            kernels compute addresses from them.
        shape: (num_rows, num_cols) of the graph.

    Raises:
        ValueError, TypeError: a tensor is wrong; the text names it, what it got and what is allowed.
    """
    bias = _per_head("bias", data.bias, order, check_values)
    multiplier = _per_head("multiplier", data.multiplier, order, check_values)
    features, types, num_features, checked_types = data.features, data.types, 0, None
    if features is not None:
        _check_edges("features", features, order)
        _check_float("features", features)
        if features.dim() != 2 or features.shape[1] == 0:
            raise ValueError(f"features: got shape {tuple(features.shape)}; [E, r] with r >= 1 is allowed")
        num_features = features.shape[1]
        if check_values:
            _check_values("features", features)
    if types is not None:
        num_types = _check_types(types, order)

    clamp = None if data.clamp is None else finite_number("clamp", data.clamp)
    if clamp is not None and clamp <= 0:
        raise ValueError(f"clamp: got {clamp}; a positive finite number is needed, or None for no clamp")

    edge = None if order is None else order.edge_of_csr
    if features is not None:
        features = gather_rows(features, edge, padded_columns(num_features))
    if types is not None:
        types = types.index_select(0, edge).to(torch.uint8)
        checked_types = types, num_types
    weights = data.key_weight, data.value_weight, data.type_weight, data.key_factor
    slope = finite_number("additive_slope", data.additive_slope)
    owner = order if belongs_to_edges(data) else shape
    bound = BoundEdges(owner, features, types, num_features, *weights, checked_types=checked_types)
    if data.additive_weight is not None:
        bound = replace(bound, additive_weight=data.additive_weight, additive_slope=slope)
    if data.score is bias is multiplier is clamp is None:
        return bound
    lengths = {"row": shape[0], "column": shape[1], "edge": None if order is None else order.num_edges}
    term = bind_score(data.score, multiplier, bias, clamp, lengths, device, edge, check_values)
    values = {name: getattr(term, kind) for name, kind in zip(VALUES, KINDS, strict=True)}
    checked = score_shape(term.text, term.numbers, *values.values())
    return replace(bound, **values, score=term.text, score_numbers=term.numbers, checked_score=checked)


def scored_edges(
    order: EdgeOrder | None, score: str, numbers: tuple[float, ...], **values: torch.Tensor | None
) -> BoundEdges:
    """Bound edges that are a score term alone: a normalised expression, its numbers, and fields of values for them."""
    checked = score_shape(score, numbers, *map(values.get, VALUES))
    return NOTHING_BOUND.changed(order=order, score=score, score_numbers=numbers, checked_score=checked, **values)


def score_shape(score: str, numbers: Sequence[float], *values: torch.Tensor | None) -> tuple[Any, ...]:
    """(score, count of numbers, (count of values,) of rows, columns, edges and heads, or None)."""
    return score, len(numbers), *[None if each is None else each.shape[2:] for each in values]


def belongs_to_edges(data: EdgeData) -> bool:
    """Whether a tensor of the data has an entry for each edge."""
    of_edges = data.bias, data.multiplier, data.features, data.types
    has_values = isinstance(data.score, ScoreTerm) and bool(data.score.values["edge"])
    return has_values or any(each is not None for each in of_edges)


def check_edges(edges: BoundEdges, query: torch.Tensor) -> None:
    """Raise if the types or weights do not fit a `query` [N, d] or [N, H, d]; nothing here waits for the GPU.

    Raises:
        ValueError, TypeError: a weight is wrong or missing; the text names it, what it got and what is allowed.
    """
    num_heads, head_dim = (query.shape[1] if query.dim() == 3 else 1), query.shape[-1]
    for name, tensor in (("features", edges.padded_features), (VALUE_NAMES["edge"], edges.edge_values)):
        if tensor is not None and tensor.dtype != query.dtype:
            raise ValueError(f"{name}: got {tensor.dtype}, but q is {query.dtype}; they must have one type")
    if edges.score is not None:
        for kind, values in zip(KINDS, edges.values(), strict=True):
            if values is not None and values.shape[1] not in (1, num_heads):
                raise ValueError(
                    f"{VALUE_NAMES[kind]}: got {values.shape[1]} heads, but q has {num_heads}; those of one head or of "
                    f"{num_heads} are needed"
                )
    if edges.key_factor is not None and edges.types is not None:
        raise ValueError("key_factor: got with edge types; make the types features of one 1 and 0 elsewhere")
    of_features = "[H, d, r]", (num_heads, head_dim, edges.num_features)
    of_factor = "[r, H, d]", (edges.num_features, num_heads, head_dim)
    for name, form in (("key_weight", of_features), ("value_weight", of_features), ("key_factor", of_factor)):
        if (weight := getattr(edges, name)) is None:
            continue
        if edges.padded_features is None:
            raise ValueError(f"{name}: got without edge features; EdgeData(features=[E, r]) is needed with it")
        _check_weight(name, weight, *form, query)
    if edges.padded_features is not None and edges.key_weight is edges.value_weight is edges.key_factor is None:
        raise ValueError("features: got without a weight; key_weight, value_weight or key_factor is needed with them")
    if (edges.types is None) != (edges.type_weight is None):
        if edges.types is None:
            raise ValueError("type_weight: got without edge types; EdgeData(types=[E]) is needed with it")
        raise ValueError("types: got without a weight; type_weight is needed with them")
    if (weight := edges.type_weight) is not None:
        _, num_types = edges.checked_types
        least = max(num_types, 1)
        got = weight.shape[0] if isinstance(weight, torch.Tensor) and weight.dim() == 3 else least
        if not least <= got <= MAX_TYPES:
            raise ValueError(
                f"type_weight: got {got} types, but the edges have type {least - 1}; [T, H, d] with T from {least} to "
                f"{MAX_TYPES} is needed"
            )
        _check_weight("type_weight", weight, "[T, H, d]", (got, num_heads, head_dim), query)
    if (weight := edges.additive_weight) is not None:
        if not edges.type_weight is edges.key_factor is None:
            raise ValueError(
                "additive_weight: got with type_weight or key_factor, which multiply keys; without them, or with "
                "key_weight, it is allowed"
            )
        _check_weight("additive_weight", weight, "[H, d]", (num_heads, head_dim), query)


def padded_columns(num_features: int) -> int:
    """Columns of `padded_features`."""
    return -(-num_features // FEATURE_STEP) * FEATURE_STEP


def multiplied_keys(key: torch.Tensor, edges: BoundEdges, part: slice = slice(None)) -> torch.Tensor:
    """w_ij * k_j of the edges `part`, from their gathered keys [n, H, d]."""
    if edges.type_weight is not None:
        return key * edges.type_weight[edges.types[part].long()]
    if edges.key_factor is not None:
        return key * torch.einsum("er,rhd->ehd", edges.features[part], edges.key_factor)
    return key


def edge_products(query: torch.Tensor, key: torch.Tensor, edges: BoundEdges) -> torch.Tensor:
    """[nnz, H] or [nnz]: <q_i, k_ij>, or what takes its place, of gathered rows [nnz, H, d] or [nnz, d]."""
    if edges.additive_weight is None:
        return (query * key).sum(-1)
    return (functional.leaky_relu(query + key, edges.additive_slope) * edges.additive_weight).sum(-1)


def transform_scores(
    score: torch.Tensor,
    edges: BoundEdges,
    of_rows: Callable[[torch.Tensor], torch.Tensor],
    of_columns: Callable[[torch.Tensor], torch.Tensor],
    head: int | None = None,
) -> torch.Tensor:
    """The scores after the score term in torch, for backends made of torch calls and as the oracle of the kernels.

    Args:
        score: [nnz, H] scaled scores; [nnz] those of one `head`.
        of_rows, of_columns: make [nnz, ..], of each edge, from values of its row, [num_rows, ..], or column.
    """
    if edges.score is None:
        return score
    values = dict(zip(KINDS, edges.values(), strict=True))
    gather = {"row": of_rows, "column": of_columns}
    return score_of(edges.score, edges.score_numbers, score, values, gather, head)


def cast_floats(given: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor, or the tensors of edge data, to `dtype`; float64, integers and other objects are unchanged."""
    if isinstance(given, (EdgeData, BoundEdges)):
        given_fields = {each.name: getattr(given, each.name) for each in fields(given) if each.name not in WIDE}
        cast = {name: cast_floats(each, dtype) for name, each in given_fields.items()}
        return replace(given, **{name: each for name, each in cast.items() if each is not given_fields[name]})
    if isinstance(given, ScoreTerm):
        return given.with_edge_values(dtype)
    if isinstance(given, torch.Tensor) and given.is_floating_point() and given.dtype != torch.float64:
        return given.to(dtype)
    return given


def _per_head(name: str, tensor: torch.Tensor | None, order: EdgeOrder, check_values: bool) -> torch.Tensor | None:
    """The checked bias or multiplier as [E, 1] or [E, H]."""
    if tensor is None:
        return None
    _check_edges(name, tensor, order)
    _check_float(name, tensor)
    if tensor.dim() > 2 or 0 in tensor.shape[1:]:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; [E] or [E, H] is allowed")
    if check_values:
        _check_values(name, tensor)
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def _check_edges(name: str, tensor: torch.Tensor, order: EdgeOrder) -> None:
    """Raise unless `tensor` has one entry per edge of the caller and is on the plan's device."""
    check_dense(name, tensor)
    num_edges = order.num_edges
    got = tensor.shape[0] if tensor.dim() else None
    if got != num_edges:
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)}, but the graph has {num_edges} edges; {num_edges} entries are "
            "needed, in the graph's edge order, also for self loops that were added to it"
        )
    if tensor.device != order.edge_of_csr.device:
        raise ValueError(
            f"{name}: on {tensor.device}, but the graph was planned for {order.edge_of_csr.device}; they must share it"
        )


def _check_float(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name}: got {tensor.dtype}; q's floating-point type is needed")


def _check_values(name: str, tensor: torch.Tensor) -> None:
    """Raise for the first edge with a NaN or an infinity; a bias may be -inf."""
    allowed = torch.isfinite(tensor)
    if name == "bias":
        allowed |= tensor == -torch.inf
    if bool(allowed.all()):
        return
    edge, *rest = torch.nonzero(~allowed)[0].tolist()
    what = "finite numbers and -inf (weight 0) are" if name == "bias" else "finite numbers are"
    at = f"edge {edge}" + (f", column {rest[0]}" if rest else "")
    raise ValueError(f"{name}: {at} is {tensor[edge, *rest].item()}; {what} allowed, so correct or drop this edge")


def _check_types(types: torch.Tensor, order: EdgeOrder) -> int:
    """Raise unless these are valid edge types; returns the largest plus 1."""
    _check_edges("types", types, order)
    if types.dtype not in INTEGERS:
        raise ValueError(f"types: got {types.dtype}; integers are needed, one of {', '.join(map(str, INTEGERS))}")
    if types.dim() != 1:
        raise ValueError(f"types: got shape {tuple(types.shape)}; [E] is needed, one type for all heads")
    if types.numel() == 0:
        return 0
    low, high = (int(bound) for bound in types.aminmax())
    if low < 0 or high >= MAX_TYPES:
        edge = int(torch.nonzero((types < 0) | (types >= MAX_TYPES))[0])
        raise ValueError(f"types: edge {edge} is {int(types[edge])}; 0 to {MAX_TYPES - 1} are allowed; renumber them")
    return high + 1


def _check_weight(name: str, weight: torch.Tensor, names: str, shape: tuple[int, ...], query: torch.Tensor) -> None:
    check_dense(name, weight)
    if weight.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(weight.shape)}; {names} = {list(shape)} is needed")
    if weight.device != query.device:
        raise ValueError(f"{name}: on {weight.device}, but q is on {query.device}; they must share it")
    if weight.dtype != query.dtype:
        raise ValueError(f"{name}: got {weight.dtype}, but q is {query.dtype}; they must have one type")
