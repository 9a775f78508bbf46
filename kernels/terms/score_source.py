"""C++ of a score term: its value and its derivatives, as the text of cuda/score/score_expression.cuh."""

import re
from collections.abc import Sequence
from functools import lru_cache

from .score_expression import OPERATORS, SCORE, names_in, parse
from .score_graph import Graph, Node

KINDS = ("row", "column", "edge", "head")  # kinds of values, in their normalised names: row0, row1, column0, ...
NUMBER = "number"
# C++ functions that are not the name plus an f; three are in cuda/score/score_functions.cuh.
_CALLED = {"**": "powf", "abs": "fabsf", "min": "minimum", "max": "maximum", "clamp": "clamped"}
MOST_KEPT = 256  # expressions in each cache, the latest used
_HEAD = """\
#pragma once
// {text}
#include "score/score_functions.cuh"
struct ScoreExpression {{
  static constexpr int kRowValues = {row}, kColumnValues = {column}, kEdgeValues = {edge}, kHeadValues = {head};
  static constexpr bool kUsesScore = {uses_score};

  template <typename Values, typename Numbers>
  __device__ static __forceinline__ float apply(float s, const Values& x, const Numbers& number) {{
{apply}
  }}

  // Returns the gradient of s; `of` receives the gradients of the values.
  template <typename Values, typename Numbers>
  __device__ static __forceinline__ float gradient(float g, float s, const Values& x, const Numbers& number,
                                                   Values& of) {{
{gradient}
  }}
}};
"""


@lru_cache(MOST_KEPT)
def count_values(text: str) -> dict[str, int]:
    """How many values of each kind a normalised expression has."""
    names = names_in(parse(text))
    return {kind: sum(re.fullmatch(rf"{kind}\d+", name) is not None for name in names) for kind in KINDS}


@lru_cache(MOST_KEPT)
def uses_score(text: str) -> bool:
    """Whether an expression reads the score; if not, queries and keys are not read."""
    return SCORE in names_in(parse(text))


@lru_cache(MOST_KEPT)
def expression_source(text: str) -> str:
    """The text of cuda/score/score_expression.cuh for a normalised expression.

    Raises:
        ValueError: a number of the value or of a derivative is not finite and real, or there are too many operations.
    """
    names = names_in(parse(text))
    graph = Graph(text)
    named = [name for name in names if name != SCORE and not name.startswith(NUMBER)]
    partials = [graph.derivative(name) for name in (*named, SCORE)]
    lines = [f"of.{_place(name)[2:]} = g * {{}};" for name in named]
    return _HEAD.format(
        text=text,
        **count_values(text),
        uses_score=str(uses_score(text)).lower(),
        apply=_statements(graph, [graph.value], ["return {};"]),
        gradient=_statements(graph, partials, [*lines, "return g * {};"]),
    )


def _statements(graph: Graph, values: Sequence[Node | float], forms: Sequence[str]) -> str:
    """Lines of C++, one for each operation; `forms`: what becomes of each value."""
    needed, words, lines = set(values), {}, []
    for node in reversed(graph.nodes.values()):
        if node in needed:
            needed.update(node.args)

    def word(value: Node | float) -> str:
        return f"{value!r}F" if isinstance(value, float) else words[value]

    for node in graph.nodes.values():
        if node in needed and not node.args:
            words[node] = node.op if node.op == SCORE else _place(node.op)
        elif node in needed:
            words[node] = f"t{len(lines)}"
            lines.append(f"const float {words[node]} = {_operation(node.op, *map(word, node.args))};")
    lines += [form.format(word(value)) for form, value in zip(forms, values, strict=True)]
    return "\n".join(f"    {line}" for line in lines)


def _operation(op: str, *args: str) -> str:
    if op in ("<", "<="):
        x, y, then, otherwise = args
        return f"{x} {op} {y} ? {then} : {otherwise}"
    if op in OPERATORS.values() and op != "**":
        return f" {op} ".join(args)
    return f"{_CALLED.get(op, op + 'f')}({', '.join(args)})"


def _place(name: str) -> str:
    """The C++ name of a value or number: row0 is x.row[0], number0 is number[0]."""
    kind, index = re.fullmatch(r"([a-z]+)(\d+)", name).groups()
    return f"{kind}[{index}]" if kind == NUMBER else f"x.{kind}[{index}]"
