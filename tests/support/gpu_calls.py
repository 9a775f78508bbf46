"""Calls on a GPU: their inputs, and what a call must not do."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fused3s.torch_side.tensor_record import map_tensors


def inputs(rows: int, cols: int, heads: int, dim: int, dtype: torch.dtype, device: str = "cuda") -> list[torch.Tensor]:
    """Random q [rows, H, d], k and v [cols, H, d]."""
    generator = torch.Generator(device).manual_seed(rows + 7 * cols + 13 * heads + dim)
    return [torch.randn(n, heads, dim, generator=generator, device=device).to(dtype) for n in (rows, cols, cols)]


def to_gpu(record: Any) -> Any:
    """A dataclass of tensors, on the GPU."""
    return map_tensors(record, lambda tensor: tensor.cuda())


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, torch raises where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_streams_agree(run: Callable[..., Sequence[torch.Tensor]], calls: Sequence[Sequence[Any]]) -> None:
    """Many rounds, with a stream for each call, have the bits of the calls one after the other."""
    expected = [run(*call) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    found = [[] for _ in calls]
    for _ in range(25):
        for stream, call, results in zip(streams, calls, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(*call))
    torch.cuda.synchronize()
    for wanted, results in zip(expected, found, strict=True):
        assert all(all(map(torch.equal, wanted, got)) for got in results)
