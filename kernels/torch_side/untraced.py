"""Functions that read the values of a graph: torch.compile calls them untraced, with one graph break."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        from .graph_break import plan_outside_of_the_graph  # imports Dynamo, which takes a second

        return plan_outside_of_the_graph(function, *args, **kwargs)

    return call
