"""C++ of a score term: its value and its derivatives, by SymPy, as the text of cuda/score/score_expression.cuh."""

import re
from functools import cache
from typing import Any

from .score_expression import SCORE, names_in, parse, walk

KINDS = ("row", "column", "edge", "head")  # of values, in their normalised names: row0, row1, column0, ...
NUMBER = "number"
_HEAD = """\
#pragma once
// {text}
struct ScoreExpression {{
  static constexpr int kRowValues = {row}, kColumnValues = {column}, kEdgeValues = {edge}, kHeadValues = {head};
  static constexpr bool kUsesScore = {uses_score};

  template <typename Values, typename Numbers>
  __device__ static __forceinline__ float apply(float s, const Values& x, const Numbers& number) {{
{apply}
  }}

  // Returns the gradient of s; those of the values to `of`.
  template <typename Values, typename Numbers>
  __device__ static __forceinline__ float gradient(float g, float s, const Values& x, const Numbers& number,
                                                   Values& of) {{
{gradient}
  }}
}};
"""


@cache
def count_values(text: str) -> dict[str, int]:
    """How many values of each kind a normalised expression has."""
    names = names_in(parse(text))
    return {kind: sum(re.fullmatch(rf"{kind}\d+", name) is not None for name in names) for kind in KINDS}


@cache
def uses_score(text: str) -> bool:
    """Whether an expression reads the score; else queries and keys count for nothing."""
    return SCORE in names_in(parse(text))


@cache
def expression_source(text: str) -> str:
    """The text of cuda/score/score_expression.cuh for a normalised expression.

    Raises:
        ValueError: the value or a derivative is not finite anywhere, or not an expression.
    """
    import sympy  # torch brings it, and imports it as late as this

    symbols = {name: sympy.Symbol(name, real=True) for name in names_in(parse(text))}
    value = walk(parse(text), symbols.__getitem__, _number, _functions())
    named = [name for name in symbols if name != SCORE and not name.startswith(NUMBER)]
    partials = [sympy.diff(value, symbols[name]) if name in symbols else sympy.S.Zero for name in (SCORE, *named)]
    of_names = [f"the derivative of {text!r} by {name}" for name in (SCORE, *named)]
    for what, each in zip((repr(text), *of_names), (value, *partials), strict=True):
        if each.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
            raise ValueError(f"expression: {what} is not finite")
    lines = [f"of.{_place(name)} = g * ({{}});" for name in named]
    return _HEAD.format(
        text=text,
        **count_values(text),
        uses_score=str(uses_score(text)).lower(),
        apply=_statements([value], ["return {};"]),
        gradient=_statements([*partials[1:], partials[0]], [*lines, "return g * ({});"]),
    )


def _statements(values: list[Any], forms: list[str]) -> str:
    """Lines of C++ with common subexpressions taken out; `forms`: what becomes of each value."""
    import sympy

    names = sympy.numbered_symbols("t", real=True)
    shared, values = sympy.cse(values, symbols=names)
    lines = [f"const float {name} = {_cpp(value)};" for name, value in shared]
    lines += [form.format(_cpp(value)) for form, value in zip(forms, values, strict=True)]
    return "\n".join(f"    {line}" for line in lines)


def _place(name: str) -> str:
    """Where the values of a normalised name lie: row0 is row[0]."""
    kind, index = re.fullmatch(r"([a-z]+)(\d+)", name).groups()
    return f"{kind}[{index}]"


def _number(value: float) -> Any:
    import sympy

    return sympy.Integer(int(value)) if value == int(value) and abs(value) < 2**24 else sympy.Float(value)


def _functions() -> dict[str, Any]:
    """The functions of expressions in SymPy; those with a kink as Piecewise, whose derivative is one, too."""
    import sympy

    def choose(condition: Any, then: Any, otherwise: Any) -> Any:
        return sympy.Piecewise((then, condition), (otherwise, True))

    return {
        **{name: getattr(sympy, name) for name in ("exp", "log", "sqrt", "tanh", "sin", "cos")},
        "abs": lambda x: sympy.Piecewise((x, x > 0), (-x, x < 0), (0, True)),
        "sigmoid": lambda x: (1 + sympy.tanh(x / 2)) / 2,  # its derivative does not overflow
        "relu": lambda x: choose(x > 0, x, 0),
        "min": lambda x, y: choose(x < y, x, y),
        "max": lambda x, y: choose(x > y, x, y),
        "leaky_relu": lambda x, slope: choose(x > 0, x, slope * x),
        "clamp": lambda x, low, high: sympy.Piecewise((low, x < low), (high, x > high), (x, True)),
        "where": choose,
    }


def _cpp(value: Any) -> str:
    return re.sub(r"\s*\n\s*", " ", _printer().doprint(value))


@cache
def _printer() -> Any:
    from sympy.codegen.ast import float32, real
    from sympy.printing.c import C99CodePrinter

    class Printer(C99CodePrinter):
        """Small powers as products."""

        def _print_Symbol(self, symbol: Any) -> str:  # noqa: N802
            name = symbol.name
            if name.startswith(NUMBER):
                return _place(name)
            return f"x.{_place(name)}" if re.fullmatch(rf"({'|'.join(KINDS)})\d+", name) else name

        def _print_Pow(self, power: Any, rational: bool = False) -> str:  # noqa: N802
            base, exponent = power.as_base_exp()
            if exponent.is_Integer and 2 <= abs(int(exponent)) <= 4:
                factor = self.parenthesize(base, 1000)
                product = "*".join([factor] * abs(int(exponent)))
                return f"({product})" if exponent > 0 else f"(1.0F/({product}))"
            return super()._print_Pow(power)

    return Printer({"type_aliases": {real: float32}})
