"""C++ of a score term: its value and its derivatives, by SymPy, as the text of cuda/score/score_expression.cuh."""

import re
from functools import cache, lru_cache
from typing import Any

from .score_expression import SCORE, names_in, parse, walk

KINDS = ("row", "column", "edge", "head")  # kinds of values, in their normalised names: row0, row1, column0, ...
NUMBER = "number"
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

  // Returns the gradient of s; those of the values to `of`.
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
    """Whether an expression reads the score; else queries and keys count for nothing."""
    return SCORE in names_in(parse(text))


@lru_cache(MOST_KEPT)
def expression_source(text: str) -> str:
    """The text of cuda/score/score_expression.cuh for a normalised expression.

    Raises:
        ValueError: the value or a derivative is nowhere finite and real, or not an expression.
    """
    import sympy  # torch brings it, and imports it as late as this

    symbols = {name: sympy.Symbol(name) for name in names_in(parse(text))}
    value = walk(parse(text), symbols.__getitem__, _number, _functions())
    named = [name for name in symbols if name != SCORE and not name.startswith(NUMBER)]
    partials = [sympy.diff(value, symbols[name]) if name in symbols else sympy.S.Zero for name in (SCORE, *named)]
    of_names = [f"the derivative of {text!r} by {name}" for name in (SCORE, *named)]
    for what, each in zip((repr(text), *of_names), (value, *partials), strict=True):
        if each.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo, sympy.I):
            raise ValueError(f"expression: {what} is not finite and real")
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

    shared, values = sympy.cse(values, symbols=sympy.numbered_symbols("t"))
    text = _printer().doprint
    lines = [f"const float {name} = {text(value)};" for name, value in shared]
    lines += [form.format(text(value)) for form, value in zip(forms, values, strict=True)]
    return "\n".join(f"    {line}" for line in lines)


def _place(name: str) -> str:
    """Where the values of a normalised name lie: row0 is row[0]."""
    kind, index = re.fullmatch(r"([a-z]+)(\d+)", name).groups()
    return f"{kind}[{index}]"


def _number(value: float) -> Any:
    import sympy

    return sympy.Integer(int(value)) if value == int(value) and abs(value) < 2**24 else sympy.Float(value)


@cache
def _functions() -> dict[str, Any]:
    """The functions of expressions in SymPy. Those with a kink are opaque, since SymPy's own conditions know no NaN; at
    the kink they have torch's subgradient."""
    import sympy

    class ChoiceBase(sympy.Function):  # printers look for methods of base classes named so
        """(a, b, x, y): x where a `sign` b, which is < or <=; else y."""

        @classmethod
        def eval(cls, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
            return then if then == otherwise else None

        def _eval_derivative(self, of: Any) -> Any:
            a, b, *branches = self.args
            return self.func(a, b, *(each.diff(of) for each in branches))

    class KinkBase(sympy.Function):
        """A function of C++ or cuda/score/score_functions.cuh. `choose`: its derivative, from arguments and theirs."""

        def _eval_derivative(self, of: Any) -> Any:
            return self.choose(*self.args, *(each.diff(of) for each in self.args))

    def kink(name: str, choose: Any) -> Any:
        return type(KinkBase)(name, (KinkBase,), {"choose": staticmethod(choose)})

    less, less_equal = (
        type(ChoiceBase)(name, (ChoiceBase,), {"sign": sign}) for name, sign in (("less", "<"), ("less_equal", "<="))
    )

    def relu(x: Any) -> Any:
        return less_equal(x, 0, 0, x)

    def where(condition: Any, then: Any, otherwise: Any) -> Any:
        if condition in (sympy.true, sympy.false):  # a comparison of numbers
            return then if condition else otherwise
        chosen = less if isinstance(condition, (sympy.Lt, sympy.Gt)) else less_equal
        return chosen(condition.lts, condition.gts, then, otherwise)

    return {
        **{name: getattr(sympy, name) for name in ("exp", "log", "sqrt", "tanh", "sin", "cos")},
        "sigmoid": lambda x: (1 + sympy.tanh(x / 2)) / 2,  # its derivative does not overflow
        "relu": relu,
        "leaky_relu": lambda x, slope: relu(x) if slope == 0 else less(0, x, x, slope * x),
        "where": where,
        "abs": kink("fabsf", lambda x, dx: less(0, x, dx, less(x, 0, -dx, 0))),
        "max": kink("maximum", lambda x, y, dx, dy: less(y, x, dx, less(x, y, dy, (dx + dy) / 2))),
        "min": kink("minimum", lambda x, y, dx, dy: less(x, y, dx, less(y, x, dy, (dx + dy) / 2))),
        "clamp": kink("clamped", lambda x, a, b, dx, da, db: less(x, a, da, less(b, x, db, dx))),
    }


@cache
def _printer() -> Any:
    from sympy.codegen.ast import float32, real
    from sympy.printing.c import C99CodePrinter

    class Printer(C99CodePrinter):
        """Small powers as products, and all numbers as floats."""

        def _print_Symbol(self, symbol: Any) -> str:  # noqa: N802
            name = symbol.name
            if name.startswith(NUMBER):
                return _place(name)
            return f"x.{_place(name)}" if re.fullmatch(rf"({'|'.join(KINDS)})\d+", name) else name

        def _print_Integer(self, number: Any) -> str:  # noqa: N802
            return f"{number.p}.0F"  # C++ divides whole numbers as such

        def _print_KinkBase(self, kink: Any) -> str:  # noqa: N802
            return f"{type(kink).__name__}({', '.join(map(self._print, kink.args))})"

        def _print_ChoiceBase(self, choice: Any) -> str:  # noqa: N802
            a, b, then, otherwise = map(self._print, choice.args)
            return f"({a} {choice.sign} {b} ? {then} : {otherwise})"

        def _print_Pow(self, power: Any, rational: bool = False) -> str:  # noqa: N802
            base, exponent = power.as_base_exp()
            if exponent.is_Integer and 2 <= abs(int(exponent)) <= 4:
                factor = self.parenthesize(base, 1000)
                product = "*".join([factor] * abs(int(exponent)))
                return f"({product})" if exponent > 0 else f"(1.0F/({product}))"
            return super()._print_Pow(power)

    return Printer({"type_aliases": {real: float32}})
