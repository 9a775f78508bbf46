"""Expressions of scores: Python's arithmetic over names, read without running it.

Allowed are numbers, the score `s`, names of values, + - * / **, and FUNCTIONS; `where(a < b, x, y)` takes one
comparison. An expression is evaluated in torch here, and translated to C++ by `score_source`.
"""

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

SCORE = "s"
# Names, and their number of arguments.
FUNCTIONS = {
    **dict.fromkeys(("exp", "log", "sqrt", "abs", "tanh", "sigmoid", "sin", "cos", "relu"), 1),
    **dict.fromkeys(("min", "max", "leaky_relu"), 2),
    **dict.fromkeys(("clamp", "where"), 3),
}
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
MOST_NUMBER = 3.4028234663852886e38  # largest float32
MOST_CHARACTERS = 30_000  # most characters of an expression, parsed in a second
MOST_LEVELS = 100  # operations in each other: Python's recursion limit, of any version, is far above
_ALLOWED = f"numbers, s, names of values, {' '.join(OPERATORS.values())} and {', '.join(FUNCTIONS)} are"

Node = Callable[..., Any]


@lru_cache(256)
def parse(text: str, most_levels: int = MOST_LEVELS + 8) -> ast.expr:
    """The checked syntax tree of an expression.

    Args:
        most_levels: how many operations may lie in each other; multiplier, bias and clamp add a few to a caller's.

    Raises:
        ValueError: it is none; the text says which part, and what is allowed.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"expression: {text[:40]!r}.. has {len(text)} characters, up to {MOST_CHARACTERS} are allowed; compute a "
            "part of it as a value"
        )
    source = text.strip()
    deep = f"expression: {len(text)} characters are nested too deeply; compute a part of it as a value"
    text = text if len(text) < 200 else f"{text[:200]}.."
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, lone surrogates
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"expression: {text!r} cannot be read: {reason}; it is Python's arithmetic") from None
    except (RecursionError, MemoryError):  # raised by the parser, far above `most_levels`
        raise ValueError(deep) from None

    def refuse(node: ast.AST) -> None:
        raise ValueError(f"expression: {text!r} has {ast.get_source_segment(source, node)!r}; {_ALLOWED} allowed")

    def visit(node: ast.expr, level: int, is_condition: bool = False) -> None:
        if level > most_levels:
            raise ValueError(deep)
        match node:
            case ast.Compare(ops=[op]) if is_condition and type(op) in COMPARISONS:
                visit(node.left, level + 1), visit(node.comparators[0], level + 1)
            case _ if is_condition:
                raise ValueError(
                    f"expression: {text!r} has where({ast.get_source_segment(source, node)}, ..); one comparison is "
                    f"needed there, with {' '.join(COMPARISONS.values())}"
                )
            case ast.Constant(value=value):
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    refuse(node)
                if abs(value) > MOST_NUMBER:
                    what = ast.get_source_segment(source, node)
                    most = f"up to {MOST_NUMBER:.2g} is allowed, as in float32"
                    raise ValueError(f"expression: {text!r} has the number {what}; {most}")
            case ast.Name():
                if node.id in FUNCTIONS:
                    raise ValueError(f"expression: {text!r} has the function {node.id} without arguments")
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                visit(node.operand, level + 1)
            case ast.BinOp() if type(node.op) in OPERATORS:
                visit(node.left, level + 1), visit(node.right, level + 1)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                if len(node.args) != FUNCTIONS[name]:
                    raise ValueError(
                        f"expression: {text!r} gives {name} {len(node.args)} arguments; it takes {FUNCTIONS[name]}"
                    )
                for place, argument in enumerate(node.args):
                    visit(argument, level + 1, name == "where" and place == 0)
            case _:
                refuse(node)

    visit(tree, 1)
    return tree


def names_in(tree: ast.expr) -> list[str]:
    """The names of values in an expression, each once, in their order in the text; `s` is one of them."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called]
    return list(dict.fromkeys(node.id for node in sorted(names, key=lambda node: node.col_offset)))


def renamed(tree: ast.expr, names: Mapping[str, str]) -> str:
    """The text of an expression with other names, or expressions, for its values."""

    class Rename(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return parse(names[node.id]) if node.id in names else node

    return ast.unparse(Rename().visit(ast.parse(ast.unparse(tree), mode="eval").body))


def evaluate(text: str, values: Mapping[str, torch.Tensor | float]) -> torch.Tensor:
    """The value of an expression in torch, differentiable; tensors of `values` are broadcast."""
    like = next((value for value in values.values() if isinstance(value, torch.Tensor)), torch.zeros(()))

    def tensor(value: torch.Tensor | float) -> torch.Tensor:
        return value if isinstance(value, torch.Tensor) else like.new_full((), value)

    functions: dict[str, Node] = {
        **{name: getattr(torch, name) for name in ("exp", "log", "sqrt", "abs", "tanh", "sigmoid", "sin", "cos")},
        **{"+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div, "**": torch.pow},
        **{"<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge},
        "relu": torch.relu,
        "min": torch.minimum,
        "max": torch.maximum,
        "leaky_relu": lambda x, slope: torch.where(x > 0, x, slope * x),
        "clamp": lambda x, low, high: torch.where(
            (x < low) | low.isnan(), low, torch.where((x > high) | high.isnan(), high, x)
        ),
        "where": torch.where,
    }
    return walk(parse(text), lambda name: tensor(values[name]), tensor, functions)


def walk(tree: ast.expr, of_name: Node, of_number: Node, functions: Mapping[str, Node]) -> Any:
    """Evaluate a checked tree; `functions`: FUNCTIONS, OPERATORS and COMPARISONS by name or sign."""

    def visit(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=number):
                return of_number(float(number))
            case ast.Name(id=name):
                return of_name(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return functions["*"](of_number(-1.0), visit(operand))
            case ast.UnaryOp(operand=operand):
                return visit(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return functions[OPERATORS[type(op)]](visit(left), visit(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return functions[COMPARISONS[type(op)]](visit(left), visit(right))
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return functions[name](*map(visit, arguments))
        raise AssertionError(ast.dump(node))

    return visit(tree)
