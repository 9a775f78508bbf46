"""Layouts of the structs that kernels share with the host, parsed from the CUDA source.

A kernel takes one struct by value; the host sets its members by name. Members of nested structs and elements of arrays
have compound names: `dropout_seed`, `rows_0`.
"""

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import compress, repeat
from operator import is_not, itemgetter, not_
from pathlib import Path

import torch

from .source import read_source

FORMATS = {"i64": "q", "u64": "Q", "int": "i", "u32": "I", "float": "f"}  # formats of `struct`; types of common.cuh
POINTER = "Q"
_NONES = repeat(None)  # endless
# Writes a struct Params into a buffer; and the tensors that it has pointers to, in its order, from those by name.
_Packer = tuple[Callable[..., None], Callable[[Mapping[str, torch.Tensor | None]], Sequence[torch.Tensor]]]


class ParamsLayout:
    """Members of a struct Params: pointers, then scalars.

    Attributes:
        name: name of the struct.
        pointers, scalars: format characters of module `struct`, by member name.
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
        # Both caches live as long as the layout. A model repeats the same numbers at every call.
        self.pack_scalars = lru_cache(1024)(self._pack_scalars)
        self._pointers, self._known = struct.Struct(f"<{len(self.pointers)}{POINTER}"), set()
        # Key: names in a call, and which of them have a tensor; a few entries for each call in the sources.
        self._packers: dict[tuple[tuple[str, ...], tuple[bool, ...]], _Packer] = {}

    def _pack_scalars(self, **scalars: float) -> bytes:
        """All scalars in C layout, given by name.

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
        """Fill the struct: addresses of the tensors by name, null for None and missing names; then the packed scalars.

        Raises:
            TypeError: a name is unknown, or `scalars` has the wrong size.
            ValueError: the memory of a tensor was freed.
        """
        # No loop over tensors in Python: the host time of a launch counts.
        key = tuple(tensors), tuple(map(is_not, tensors.values(), _NONES))
        pack_into, in_order = self._packers.get(key) or self._make_packer(*key, scalars)
        given = in_order(tensors)
        addresses = list(map(torch.Tensor.data_ptr, given))
        if not all(addresses):
            for each in compress(given, map(not_, addresses)):
                _check_empty(each, tensors)
        pack_into(buffer, 0, *addresses, scalars)

    def pack_pointers(self, addresses: Mapping[str, int]) -> bytes:
        """The pointers in C layout, given by name; null for missing names.

        Raises:
            TypeError: a name is unknown.
        """
        names = tuple(addresses)
        if names not in self._known:
            self.check_names(names)
            self._known.add(names)
        return self._pointers.pack(*[addresses.get(name, 0) for name in self.pointers])

    def check_names(self, names: Iterable[str]) -> None:
        """Raise a TypeError unless every name is that of a pointer."""
        if unknown := [name for name in names if name not in self.pointers]:
            raise TypeError(
                f"struct {self.name}: got unknown tensors {_listed(unknown)}; it has {_listed(self.pointers)}"
            )

    def _make_packer(self, names: tuple[str, ...], are_given: tuple[bool, ...], scalars: bytes) -> "_Packer":
        self.check_names(names)
        if len(scalars) != self._pack.size:
            raise TypeError(
                f"struct {self.name}: got {len(scalars)} bytes of scalars; pack all of {_listed(self.scalars)} "
                f"by pack_scalars, {self._pack.size} bytes"
            )
        given = set(compress(names, are_given))
        form = "".join(POINTER if name in given else "8x" for name in self.pointers)
        in_order = [name for name in self.pointers if name in given]
        # An itemgetter of one name returns no tuple.
        get = itemgetter(*in_order) if len(in_order) > 1 else lambda tensors: [tensors[name] for name in in_order]
        packer = struct.Struct(f"<{form}{self._pack.size}s").pack_into, get
        self._packers[names, are_given] = packer
        return packer


@cache
def params_layout(source: str | Path, function: str) -> ParamsLayout:
    """Layout of the struct Params of kernel `function` in a CUDA source.

    Raises:
        ValueError: the source has no such kernel or struct, or this module cannot parse it.
    """
    text = read_source(source)
    signature = re.search(rf"\b{function}\(const __grid_constant__ (\w+) \w+\)", text)
    if signature is None:
        raise ValueError(f"{source}: no kernel {function}(const __grid_constant__ Params p) was found")
    return ParamsLayout(signature[1], struct_members(text, signature[1]))


def struct_members(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Names and formats of the members of a struct in a CUDA source, nested structs flattened.

    Raises:
        ValueError: the struct is missing, or the type of a member is unknown.
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
    """The value of a number or of a named constant of the source."""
    constant = re.search(rf"^constexpr int {literal} = (\d+);", text, re.MULTILINE)
    return int(constant[1] if constant else literal)


def _with_gaps(formats: str) -> struct.Struct:
    """Scalars after pointers in C layout: each aligned to its size, the total to eight bytes."""
    form, offset = "<", 0
    for each in formats:
        size = struct.calcsize(f"<{each}")
        form, offset = f"{form}{-offset % size}x{each}", offset + -offset % size + size
    return struct.Struct(f"{form}{-offset % 8}x")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def elements(**arrays: Sequence[int]) -> dict[str, int]:
    """Names and values of array elements: `elements(rows=(3, 5))` is {"rows_0": 3, "rows_1": 5}."""
    return {f"{name}_{i}": value for name, values in arrays.items() for i, value in enumerate(values)}


def _check_empty(tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Raise a ValueError unless one of the tensors, which has no memory, has no elements."""
    if tensor.numel():
        name = next(name for name, each in tensors.items() if each is tensor)
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)} without memory; its storage was resized to 0 bytes")
