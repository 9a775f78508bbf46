"""A score term: any function of a score and of values of its row, column, edge and head, written as an expression.

    ScoreTerm("s + log_w", col={"log_w": w})                              a weight of each key
    ScoreTerm("leaky_relu(a + b, 0.2)", row={"a": l}, col={"b": r})       GAT: no query and no key at all
    ScoreTerm("cap * tanh(s / cap)", cap=30.0)                            a soft cap
    ScoreTerm("s - slope * d", edge={"d": distance}, head={"slope": m})   distances, with a slope for each head

`s` is scale * <q_i, k_ij>, with multiplier and bias where `EdgeData` has them; a clamp comes after the term. All of
them are one expression for the kernels (`whole_expression`), which compile it and its derivatives, so that every value
has a gradient, the same bits on every run.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..arguments import DTYPES, check_dense, finite_number
from ..runtime.gather_rows import gather_rows
from .score_expression import FUNCTIONS, MOST_LEVELS, MOST_NUMBER, SCORE, evaluate, names_in, parse, renamed
from .score_source import KINDS, MOST_KEPT, NUMBER, count_values, expression_source

MOST_NUMBERS = 8  # as in cuda/score/score_term_params.cuh
MOST_VALUES = 16  # per kind
MOST_LITERALS = 32  # expressions that differ in them alone, before a warning
LENGTHS = {"row": "[num_rows]", "column": "[num_cols]", "edge": "[E]", "head": "[H]"}
ARGUMENTS = {"row": "row", "column": "col", "edge": "edge", "head": "head"}


class ScoreTerm:
    """An expression of the score, and the values that it names.

    Args:
        expression: Python's arithmetic over numbers, `s` and the names below, with the functions exp, log, sqrt, abs,
            tanh, sigmoid, sin, cos, relu(x), leaky_relu(x, slope), min(x, y), max(x, y), clamp(x, low, high) and
            where(x < y, then, otherwise). A score of -inf hides the edge.
        row: values of the queries, [num_rows] or [num_rows, H], by name; floating point.
        col: values of the keys, [num_cols] or [num_cols, H].
        edge: values of the edges, [E] or [E, H] in the graph's own edge order, of q's type.
        head: values of the heads, [H], or one value without dimensions for all heads.
        numbers: finite numbers by name, without gradients; at most 8.

    Values of rows, columns and heads are used in float32, or in float64 where q is.

    A NaN in the score or in a value makes the row NaN, with two exceptions: a comparison with NaN is false, as in
    Python, and `where` ignores the branch that it does not choose. The kernels use simplified algebra: s - s and 0 * s
    are 0.

    Derivatives at a kink are torch's: 0 for abs and relu at 0, `slope` for leaky_relu at 0, one half for each argument
    of min and max at a tie, 1 for x of clamp at a bound. `where` has the derivative of the branch that it chooses.

    Each expression compiles kernels, some seconds each on first use, and a literal is part of the expression: "0.2 * s"
    and "0.3 * s" are two. A number ("c * s", c=0.2) can change without a recompilation. Kernels stay loaded; 32
    expressions that differ only in literals cause a warning.

    Raises:
        ValueError, TypeError: the expression or a value is wrong; the text names it and says what is allowed.
    """

    def __init__(
        self,
        expression: str,
        *,
        row: Mapping[str, torch.Tensor] | None = None,
        col: Mapping[str, torch.Tensor] | None = None,
        edge: Mapping[str, torch.Tensor] | None = None,
        head: Mapping[str, torch.Tensor] | None = None,
        **numbers: float,
    ) -> None:
        if not isinstance(expression, str):
            raise TypeError(f"expression: got {type(expression).__name__}; a text such as 's + bias' is needed")
        self.expression = expression
        given = dict(zip(KINDS, (row, col, edge, head), strict=True))
        for kind, values in given.items():
            if values is not None and not isinstance(values, Mapping):
                got = type(values).__name__
                raise TypeError(f"{ARGUMENTS[kind]}: got {got}; a dict of tensors by their names is needed")
            for name in values or ():
                if not isinstance(name, str):
                    raise TypeError(f"{ARGUMENTS[kind]}: got the name {name!r}; a text is needed")
        self.values = {kind: dict(values or {}) for kind, values in given.items()}
        # + 0.0: -0.0 and 0.0 are equal to caches, but 1 / x tells them apart.
        self.numbers = {name: finite_number(name, number) + 0.0 for name, number in numbers.items()}
        if large := [name for name, number in self.numbers.items() if abs(number) > MOST_NUMBER]:
            got = self.numbers[large[0]]
            raise ValueError(f"{large[0]}: got {got}; up to {MOST_NUMBER:.2g} is allowed, as in float32")
        names = {kind: tuple(values) for kind, values in self.values.items()}
        self.text = _normalised(expression, (*names.items(), (NUMBER, tuple(numbers))))

    def tensors(self) -> list[torch.Tensor]:
        """All values that are tensors."""
        return [value for values in self.values.values() for value in values.values()]

    def with_edge_values(self, dtype: torch.dtype) -> "ScoreTerm":
        """The same with values of edges of this type."""
        edge = {name: value.to(dtype) for name, value in self.values["edge"].items()}
        row, col, _, head = self.values.values()
        return ScoreTerm(self.expression, row=row, col=col, edge=edge, head=head, **self.numbers)

    def __repr__(self) -> str:
        return f"ScoreTerm({self.expression!r})"


@lru_cache(MOST_KEPT)  # layers make their term anew at every call
def _normalised(expression: str, names: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    """The expression with row0, column0, edge0, head0, number0, .. in place of the names of each kind."""
    tree = parse(expression, MOST_LEVELS)
    new_names = {SCORE: SCORE}
    for kind, of_kind in names:
        for index, name in enumerate(of_kind):
            if name in FUNCTIONS or name == SCORE:
                raise ValueError(f"{name}: the score and functions have this name; another one is needed")
            if name in new_names:
                raise ValueError(f"{name}: given twice; one value has the name")
            new_names[name] = f"{kind}{index}"
        most = MOST_NUMBERS if kind == NUMBER else MOST_VALUES
        if len(of_kind) > most:
            raise ValueError(f"{kind}: got {len(of_kind)} values; at most {most} are allowed")
    used = names_in(tree)
    if unknown := [name for name in used if name not in new_names]:
        raise ValueError(
            f"expression: {expression!r} names {unknown[0]!r}; s and the given values are known: "
            f"{', '.join(name for name in new_names if name != SCORE) or 'none'}"
        )
    if unused := [name for name in new_names if name not in (SCORE, *used)]:
        raise ValueError(f"{unused[0]}: given, but {expression!r} does not name it")
    text = renamed(tree, new_names)
    _count_literals(text)
    expression_source(text)  # finds numbers that are not finite, and too many operations
    return text


@lru_cache(MOST_KEPT)
def _texts_of(form: str) -> set[str]:
    """The expressions of a form met so far, up to MOST_LITERALS."""
    return set()


def _count_literals(text: str) -> None:
    """Warn once if MOST_LITERALS expressions differ only in literals: with a number, one expression would do."""
    texts = _texts_of(re.sub(r"(?<!\w)[\d.]+(e[+-]?\d+)?", "0", text))
    if len(texts) < MOST_LITERALS and text not in texts:
        texts.add(text)
        if len(texts) == MOST_LITERALS:
            warnings.warn(
                f"ScoreTerm: {MOST_LITERALS} expressions differ from {text!r} in literals alone, and each compiles its "
                "own kernels, which stay loaded; give what changes as a number, which needs no compilation: "
                'ScoreTerm("leaky_relu(s, slope)", slope=0.2)',
                stacklevel=4,
            )


def whole_expression(term: ScoreTerm | None, has_multiplier: bool, has_bias: bool, has_clamp: bool) -> str:
    """clamp(f(s * multiplier + bias), -c, c): the normalised expression of a term f with multiplier and bias as further
    values of edges, and c as a further number. Without a term torch.compile can trace it.

    Raises:
        ValueError: there are too many numbers.
    """
    num_edge, num_numbers = (0, 0) if term is None else (len(term.values["edge"]), len(term.numbers))
    text = f"{SCORE} * edge{num_edge}" if has_multiplier else SCORE
    if has_bias:
        text = f"{text} + edge{num_edge + has_multiplier}"
    if term is not None:
        text = _substituted(term.text, text)
    if has_clamp:
        if num_numbers == MOST_NUMBERS:
            raise ValueError(f"score: got {num_numbers} numbers; at most {MOST_NUMBERS - 1} are allowed with a clamp")
        text = f"clamp({text}, -{NUMBER}{num_numbers}, {NUMBER}{num_numbers})"
    return text


@lru_cache(MOST_KEPT)
def _substituted(text: str, score: str) -> str:
    """An expression with another one in place of the score."""
    return renamed(parse(text), {SCORE: score})


@dataclass(frozen=True, eq=False)
class BoundScore:
    """A score term as backends take it.

    Attributes:
        text: the normalised expression.
        numbers: of number0, number1, ...
        row, column, head: [num_rows, 1 or H, n], [num_cols, 1 or H, n], [1, 1 or H, n] float32 or float64;
            None without values.
        edge: [nnz, 1 or H, n] of q's type, in CSR order: values of the term, multiplier, bias.
    """

    text: str
    numbers: tuple[float, ...]
    row: torch.Tensor | None
    column: torch.Tensor | None
    edge: torch.Tensor | None
    head: torch.Tensor | None


def bind_score(
    term: ScoreTerm | None,
    multiplier: torch.Tensor | None,
    bias: torch.Tensor | None,
    clamp: float | None,
    lengths: Mapping[str, int],
    device: torch.device,
    edge_order: torch.Tensor | None,
    check_values: bool,
) -> BoundScore:
    """Check the values of a term and put those of a kind side by side.

    Args:
        multiplier, bias: [E, 1 or H], checked.
        clamp: c, checked.
        lengths: how many rows, columns and edges there are, by kind.
        edge_order: [nnz], the caller's edge of each edge in CSR order; may be None without values of edges.
        check_values: look for NaN and +inf, which waits for the GPU.
    """
    if not isinstance(term, ScoreTerm | None):
        raise TypeError(f"score: got {type(term).__name__}; a ScoreTerm is needed")
    stacked = {}
    for kind in KINDS:
        values = {} if term is None else term.values[kind]
        checked = {name: _checked(name, value, kind, lengths.get(kind), device) for name, value in values.items()}
        if check_values:
            for name, value in checked.items():
                if bool((value.isnan() | (value == torch.inf)).any()):
                    raise ValueError(f"{name}: has a NaN or +inf; finite numbers and -inf are allowed")
        if kind == "edge":
            others = {"multiplier": multiplier, "bias": bias}
            checked |= {name: value for name, value in others.items() if value is not None}
        else:
            checked = {
                name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in checked.items()
            }
        together = _side_by_side(checked)
        if kind == "edge" and together is not None:
            together = gather_rows(together, edge_order)
        stacked[kind] = together
    numbers = [] if term is None else list(term.numbers.values())
    given = multiplier is not None, bias is not None, clamp is not None
    text = whole_expression(term, *given)
    return BoundScore(text, tuple(numbers if clamp is None else [*numbers, clamp]), **stacked)


def _side_by_side(values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """[length, 1 or H, n] of n values [length, 1 or H]; None of none."""
    if len(values) < 2:
        return next((value.unsqueeze(2) for value in values.values()), None)
    num_heads = max(value.shape[1] for value in values.values())
    for name, value in values.items():
        if value.shape[1] not in (1, num_heads):
            raise ValueError(f"{name}: got {value.shape[1]} heads, but another value has {num_heads}")
    return torch.stack([value.expand(-1, num_heads) for value in values.values()], -1)


def _checked(name: str, value: Any, kind: str, length: int | None, device: torch.device) -> torch.Tensor:
    """The value as [length, 1 or H], of heads as [1, 1 or H]."""
    check_dense(name, value)
    if value.dtype not in DTYPES:
        raise ValueError(f"{name}: got {value.dtype}; a floating-point type is needed")
    if value.device != device:
        raise ValueError(f"{name}: on {value.device}, but the graph was planned for {device}; they must share it")
    if kind == "head":
        if value.dim() > 1:
            raise ValueError(f"{name}: got shape {tuple(value.shape)}; [H], or no dimension, is needed of a head value")
        return value.reshape(1, -1)
    if value.dim() not in (1, 2) or value.shape[0] != length:
        form = LENGTHS[kind]
        raise ValueError(
            f"{name}: got shape {tuple(value.shape)}; {form} or {form[:-1]}, H] is needed of a value of "
            f"{ARGUMENTS[kind]}, with {length} entries"
        )
    return value.unsqueeze(1) if value.dim() == 1 else value


def score_of(
    text: str,
    numbers: tuple[float, ...],
    score: torch.Tensor,
    values: Mapping[str, torch.Tensor | None],
    gather: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    head: int | None = None,
) -> torch.Tensor:
    """The score after a term, in torch.

    Args:
        score: [nnz, H]; [nnz] of one `head`.
        values: by kind, as in `BoundScore`.
        gather: makes [nnz, ..] of values of rows and of columns.
    """
    named: dict[str, Any] = {SCORE: score} | {f"{NUMBER}{i}": number for i, number in enumerate(numbers)}
    for kind, count in count_values(text).items():
        if not count:
            continue
        of_edges = gather[kind](values[kind]) if kind in gather else values[kind]
        if head is not None:
            of_edges = of_edges[:, head if of_edges.shape[1] > 1 else 0]
        named |= {f"{kind}{i}": of_edges[..., i].to(score.dtype) for i in range(count)}
    return evaluate(text, named).expand_as(score)
