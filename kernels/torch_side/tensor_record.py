"""Functions over the tensors of (nested) frozen dataclasses."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

Record = TypeVar("Record")


def tensors_of(record: Any) -> Iterator[torch.Tensor]:
    """All tensors of a record and of its nested records."""
    for value in (getattr(record, field.name) for field in fields(record)):
        if isinstance(value, torch.Tensor):
            yield value
        elif is_dataclass(value):
            yield from tensors_of(value)


def num_bytes(record: Any) -> int:
    """Bytes of all tensors of a record."""
    return sum(tensor.nbytes for tensor in tensors_of(record))


def map_tensors(record: Record, function: Callable[[torch.Tensor], torch.Tensor]) -> Record:
    """The record with `function` applied to each of its tensors."""

    def mapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        return map_tensors(value, function) if is_dataclass(value) else value

    return replace(record, **{field.name: mapped(getattr(record, field.name)) for field in fields(record)})
