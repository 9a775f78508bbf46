"""The graph break of `untraced`."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def plan_outside_of_the_graph(function: Callable, *args: Any, **kwargs: Any) -> Any:  # the break names this function
    return function(*args, **kwargs)
