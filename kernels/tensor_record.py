"""Frozen dataclasses of tensors and numbers: moved to a device, measured in bytes, written as plain dictionaries."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

Record = TypeVar("Record")


def tensors_of(record: Any) -> Iterator[torch.Tensor]:
    """All tensors of a record and of the records in its fields."""
    for value in _values(record):
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


def to_dict(record: Any) -> dict[str, Any]:
    """The fields of a record by name; records in them likewise."""
    return {
        field.name: to_dict(value) if is_dataclass(value) else value
        for field, value in zip(fields(record), _values(record), strict=True)
    }


def from_dict(record_type: type[Record], values: dict[str, Any]) -> Record:
    """The inverse of `to_dict`.

    Raises:
        TypeError: `values` has other keys than the record type has fields.
    """
    hints = get_type_hints(record_type)
    nested = {name: _record_type(hints.get(name)) for name, value in values.items() if isinstance(value, dict)}
    return record_type(
        **{name: from_dict(nested[name], value) if nested.get(name) else value for name, value in values.items()}
    )


def _values(record: Any) -> Iterator[Any]:
    return (getattr(record, field.name) for field in fields(record))


def _record_type(hint: Any) -> type | None:
    """The record type of a hint such as `BSB` or `BSB | None`."""
    candidates = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((candidate for candidate in candidates if is_dataclass(candidate)), None)
