"""Layouts of the structs that a kernel shares with the host, read by name from its CUDA source.

A kernel takes one struct by value, whose members the host gives by name. Members of a struct in it, and elements of an
array, have names of their own: `dropout_seed`, `rows_0`.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path

import torch

from .source import read_source

FORMATS = {"i64": "q", "u64": "Q", "int": "i", "u32": "I", "float": "f"}  # of struct, for types of common.cuh
POINTER = "Q"


class ParamsLayout:
    """Members of a struct Params: pointers, then scalars.

    Attributes:
        name: of the struct.
        pointers, scalars: formats, as of module struct, by the members' names.
        num_bytes: size of the struct.
    """

    def __init__(self, name: str, members: Iterator[tuple[str, str]]) -> None:
        self.name = name
        self.pointers: dict[str, str] = {}
        self.scalars: dict[str, str] = {}
        for member, form in members:
            if form == POINTER and self.scalars:
                raise ValueError(f"struct {name}: the pointer {member} follows a scalar; pointers must come first")
            (self.pointers if form == POINTER else self.scalars)[member] = form
        self._pack = _with_gaps("".join(self.scalars.values()))
        self.num_bytes = 8 * len(self.pointers) + self._pack.size
        # A model calls with the same numbers again and again: they are packed once. By functools, names count too.
        self.pack_scalars = lru_cache(1024)(self._pack_scalars)
        self._pointers, self._known = struct.Struct(f"<{len(self.pointers)}{POINTER}"), set()
        self._packers: dict[tuple[str, ...], tuple[struct.Struct, list[int] | None]] = {}

    def _pack_scalars(self, **scalars: float) -> bytes:
        """The scalars in C layout, all by name.

        Raises:
            TypeError: a scalar is missing, unknown, or does not fit its type.
        """
        if scalars.keys() != self.scalars.keys():
            raise TypeError(
                f"struct {self.name}: got scalars {_listed(scalars)}; it has {_listed(self.scalars)}, all are needed"
            )
        try:
            return self._pack.pack(*[scalars[name] for name in self.scalars])
        except struct.error as error:
            raise TypeError(f"struct {self.name}: {scalars} do not fit {self.scalars}: {error}") from None

    def pack_into(self, buffer: memoryview, tensors: Mapping[str, torch.Tensor | None], scalars: bytes) -> None:
        """Fill the struct: addresses of the tensors by name, null for None and for the others; scalars as packed.

        Raises:
            TypeError: a name is unknown, or the bytes are not those of all scalars.
        """
        names = tuple(tensors)
        packer, order = self._packers.get(names) or self._make_packer(names, scalars)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors.values()]
        if order is not None:
            addresses = [addresses[index] for index in order]
        packer.pack_into(buffer, 0, *addresses, scalars)

    def pack_pointers(self, addresses: Mapping[str, int]) -> bytes:
        """The pointers in C layout, by name; null for those that are left out.

        Raises:
            TypeError: a name is unknown.
        """
        names = tuple(addresses)
        if names not in self._known:
            self.check_names(names)
            self._known.add(names)
        return self._pointers.pack(*[addresses.get(name, 0) for name in self.pointers])

    def check_names(self, names: Iterable[str]) -> None:
        """Raise a TypeError where a name is not that of a pointer."""
        if unknown := [name for name in names if name not in self.pointers]:
            raise TypeError(
                f"struct {self.name}: got unknown tensors {_listed(unknown)}; it has {_listed(self.pointers)}"
            )

    def _make_packer(self, names: tuple[str, ...], scalars: bytes) -> tuple[struct.Struct, list[int] | None]:
        self.check_names(names)
        if len(scalars) != self._pack.size:
            raise TypeError(
                f"struct {self.name}: got {len(scalars)} bytes of scalars; pack all of {_listed(self.scalars)} "
                f"by pack_scalars, {self._pack.size} bytes"
            )
        form = "".join(POINTER if name in names else "8x" for name in self.pointers)
        order = [names.index(name) for name in self.pointers if name in names]
        packer = struct.Struct(f"<{form}{self._pack.size}s"), None if order == sorted(order) else order
        self._packers[names] = packer
        return packer


@cache
def params_layout(source: str | Path, function: str) -> ParamsLayout:
    """Layout of the struct that kernel `function` of a CUDA source takes.

    Raises:
        ValueError: the source has no such kernel or struct, or one that this module cannot read.
    """
    text = read_source(source)
    signature = re.search(rf"\b{function}\(const __grid_constant__ (\w+) \w+\)", text)
    if signature is None:
        raise ValueError(f"{source}: no kernel {function}(const __grid_constant__ Params p) was found")
    return ParamsLayout(signature[1], struct_members(text, signature[1]))


def struct_members(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Names and formats of the members of a struct in a CUDA source, those of structs in it in their place.

    Raises:
        ValueError: the struct is not there, or a member's type is unknown.
    """
    body = re.search(rf"^struct {name} {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    if body is None:
        raise ValueError(f"struct {name} was not found in the source")
    for declaration in re.sub(r"//.*", "", body[1]).split(";")[:-1]:
        member = re.fullmatch(r"\s*(?:const )?(\w+)(\*?) (\w+)(?:\[(\w+)\])?\s*", declaration)
        if member is None:
            raise ValueError(f"struct {name}: {declaration.strip()!r} is no `type name` or `type name[number]`")
        kind, is_pointer, label, count = member.groups()
        for each in [label] if count is None else [f"{label}_{i}" for i in range(_number(text, count))]:
            if is_pointer or kind in FORMATS:
                yield each, POINTER if is_pointer else FORMATS[kind]
            else:
                yield from ((f"{each}_{inner}", form) for inner, form in struct_members(text, kind))


def _number(text: str, literal: str) -> int:
    """A number, or a constant of the source."""
    constant = re.search(rf"^constexpr int {literal} = (\d+);", text, re.MULTILINE)
    return int(constant[1] if constant else literal)


def _with_gaps(formats: str) -> struct.Struct:
    """Scalars behind pointers in C layout: each aligned to its size, all to eight bytes."""
    form, offset = "<", 0
    for each in formats:
        size = struct.calcsize(f"<{each}")
        form, offset = f"{form}{-offset % size}x{each}", offset + -offset % size + size
    return struct.Struct(f"{form}{-offset % 8}x")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def elements(**arrays: Sequence[int]) -> dict[str, int]:
    """Names and values of the elements of array members: `elements(rows=(3, 5))` is {"rows_0": 3, "rows_1": 5}."""
    return {f"{name}_{i}": value for name, values in arrays.items() for i, value in enumerate(values)}
