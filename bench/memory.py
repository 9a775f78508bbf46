"""Exhausted memory as a message that names the step and what makes it smaller."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class OutOfMemoryError(MemoryError):
    """The text names the step, the bytes asked for where they are known, and remedies."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was exhausted, of the host or of a GPU; NumPy, torch and CuPy have errors of their own."""
    text = str(error)
    signs = ("DefaultCPUAllocator", "Storage size calculation overflowed")
    is_torch = isinstance(error, RuntimeError) and any(sign in text for sign in signs)
    return (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or type(error).__name__ == "OutOfMemoryError"
        or is_torch
    )


@contextmanager
def memory_for(step: str, remedies: Callable[[], str]) -> Iterator[None]:
    """Turn exhausted memory inside the block into an OutOfMemoryError.

    Args:
        step: what the block does, such as "building the model".
        remedies: what makes it smaller; called only then.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"out of memory while {step}: {_reason(error)}\nremedies: {remedies()}") from error


def _reason(error: BaseException) -> str:
    """The bytes that torch asked for, else the error's own first line."""
    if asked := re.search(r"tried to allocate (\d+) bytes", str(error)):
        return f"{int(asked[1]):,} bytes were asked for at once"
    if "overflowed" in str(error):
        return "a tensor would have more bytes than a process can address"
    return str(error).partition("\n")[0] or "no further detail"
