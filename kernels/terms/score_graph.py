"""The operations of a score term and of its derivatives as one graph, each operation once.

Nested expressions stay as small as their text, and so do their derivatives (forward mode). Numbers are folded in
floating point.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from .score_expression import COMPARISONS, MOST_NUMBER, OPERATORS, parse, walk

MOST_OPERATIONS = 4096  # limit for a term and its derivatives, some seconds of compilation
# Functions made of others.
COMPOSED = {
    "sigmoid": "(1 + tanh(x / 2)) / 2",  # its derivative does not overflow
    "relu": "where(x <= 0, 0, x)",
    "leaky_relu": "where(x <= 0, y * x, x)",
}
# Derivative of an operation of x, y, z, w, whose derivatives are dx, dy, dz, dw; "<" is where(x < y, z, w). Those at a
# kink are torch's. `where` chooses between derivatives: a factor 0 for the other branch would make an infinity NaN.
DERIVATIVES = {
    "+": "dx + dy",
    "-": "dx - dy",
    "*": "dx * y + x * dy",
    "/": "(dx - x * (1 / y) * dy) * (1 / y)",  # one division for all names
    "**": "y * x**(y - 1) * dx + x**y * log(x) * dy",
    "exp": "exp(x) * dx",
    "log": "dx / x",
    "sqrt": "dx / (2 * sqrt(x))",
    "tanh": "(1 - tanh(x)**2) * dx",
    "sin": "cos(x) * dx",
    "cos": "-sin(x) * dx",
    "abs": "where(0 < x, dx, where(x < 0, -dx, 0))",
    "min": "where(x < y, dx, where(y < x, dy, (dx + dy) / 2))",
    "max": "where(y < x, dx, where(x < y, dy, (dx + dy) / 2))",
    "clamp": "where(x < y, dy, where(z < x, dz, dx))",
    "<": "where(x < y, dz, dw)",
    "<=": "where(x <= y, dz, dw)",
}
_OF_NUMBERS = {
    **{name: getattr(math, name) for name in ("exp", "log", "sqrt", "tanh", "sin", "cos")},
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "**": operator.pow},
    **{"abs": abs, "min": min, "max": max, "clamp": lambda x, low, high: low if x < low else min(x, high)},
}


@dataclass(frozen=True, eq=False)  # equal nodes are one
class Node:
    """A sign or function of FUNCTIONS with its arguments; or a name, without arguments."""

    op: str
    args: tuple["Node | float", ...]


class Graph:
    """The operations of one expression.

    Attributes:
        nodes: by content; arguments come before what reads them.
        value: the node, or number, of the expression.
    """

    def __init__(self, text: str) -> None:
        """Raises a ValueError if a number is not finite and real, or if there are too many operations."""
        self.nodes: dict[tuple[Any, ...], Node] = {}
        self._text = text
        self._functions = {name: lambda *args, op=name: self._operation(op, *args) for name in _OF_NUMBERS}
        for name, formula in COMPOSED.items():
            self._functions[name] = lambda *args, formula=formula: self._formula(formula, args)
        for sign in COMPARISONS.values():
            self._functions[sign] = lambda x, y, sign=sign: (sign, x, y) if "<" in sign else ("<" + sign[1:], y, x)
        self._functions["where"] = lambda condition, x, y: self._operation(*condition, x, y)
        self.value = walk(parse(text), self._node, float, self._functions)

    def derivative(self, name: str) -> Node | float:
        """The derivative of the value by a name; its operations join the nodes."""
        changes: dict[Node | float, Node | float] = {}
        for node in list(self.nodes.values()):
            of_args = [changes.get(each, 0.0) for each in node.args]
            if node.op == name:
                changes[node] = 1.0
            elif any(of_args):
                changes[node] = self._formula(DERIVATIVES[node.op], node.args, of_args)
        return changes.get(self.value, 0.0)

    def _formula(self, text: str, args: Sequence[Node | float], of_args: Sequence[Node | float] = ()) -> Node | float:
        names = dict(zip("xyzw", args, strict=False)) | dict(zip(("dx", "dy", "dz", "dw"), of_args, strict=False))
        return walk(parse(text), names.__getitem__, float, self._functions)

    def _node(self, op: str, *args: Node | float) -> Node:
        if (found := self.nodes.get((op, *args))) is None:
            if len(self.nodes) == MOST_OPERATIONS:
                raise ValueError(
                    f"expression: {self._text!r} and its derivatives take more than {MOST_OPERATIONS} operations; "
                    "compute a part of it as a value"
                )
            found = self.nodes[op, *args] = Node(op, args)
        return found

    def _operation(self, op: str, *args: Node | float) -> Node | float:
        match (op, *args):
            case "<" | "<=", float(x), float(y), then, otherwise:
                return then if x < y or (op == "<=" and x == y) else otherwise
            case "<" | "<=", _, _, then, otherwise if then == otherwise:
                return then
            case _ if all(isinstance(each, float) for each in args):
                return self._number(op, *args)
            case ("*", 0.0, _) | ("*", _, 0.0) | ("/", 0.0, _):
                return 0.0
            case ("+", 0.0, x) | ("+" | "-", x, 0.0) | ("*", 1.0, x) | ("*" | "**", x, 1.0):
                return x
            case "+" | "*", x, float(y):
                return self._operation(op, y, x)
            case "*", -1.0, Node("*", (-1.0, x)):
                return x
            # Signs move outwards, so that derivatives which differ in sign alone share their operations.
            case ("*", Node("*", (-1.0, x)), y) | ("*", y, Node("*", (-1.0, x))):
                return self._operation("*", -1.0, self._operation("*", x, y))
            case "/", Node("*", (-1.0, x)), y:
                return self._operation("*", -1.0, self._operation("/", x, y))
            case ("+", Node("*", (-1.0, x)), Node("*", (-1.0, y))) | ("-", Node("*", (-1.0, x)), y):
                return self._operation("*", -1.0, self._operation("+", x, y))
            case ("+", x, Node("*", (-1.0, y))) | ("+", Node("*", (-1.0, y)), x):
                return self._operation("-", x, y)
            case "-", x, Node("*", (-1.0, y)):
                return self._operation("+", x, y)
            case "-", x, y if x is y:
                return 0.0
            case "-", 0.0, x:
                return self._node("*", -1.0, x)
            case "/", x, float(y):
                return self._operation("*", x, self._number("/", 1.0, y))
            case "/", x, Node("*", (float(factor), y)):
                return self._operation("/", self._operation("/", x, factor), y)
            case "**", _, 0.0:
                return 1.0
            case "**", x, 0.5:
                return self._node("sqrt", x)
            case "**", x, 2.0 | 3.0 | 4.0 as power:
                return reduce(lambda product, factor: self._node("*", product, factor), [x] * int(power))
            case "**", x, float(power) if power < 0:
                return self._node("/", 1.0, self._operation("**", x, -power))
        return self._node(op, *args)

    def _number(self, op: str, *args: float) -> float:
        try:
            found = _OF_NUMBERS[op](*args)
        except (ArithmeticError, ValueError):
            found = math.nan
        if not abs(found) <= MOST_NUMBER or isinstance(found, complex):
            what = f"{args[0]} {op} {args[1]}" if op in OPERATORS.values() else f"{op}({', '.join(map(str, args))})"
            raise ValueError(f"expression: {self._text!r} is not finite and real, or a derivative is not: {what}")
        return found
