"""Backends that fail in every way a measuring script has to report, with the status and reason that it should give."""

import torch

from bench.baselines import REGISTRY
from fused3s import UnsupportedGraphError
from fused3s.backends.base import Backend


class Broken(Backend):
    """A backend that raises `outcome`, or fills the output with it where it is a number."""

    summary = "a backend of the tests"

    def __init__(self, name: str, outcome: Exception | float) -> None:
        self.name, self.outcome = name, outcome

    def unavailable(self, device):
        return "not on a weekday" if self.name == "absent" else None

    def unsupported(self, dtype, head_dim):
        return "it takes no head dimension" if self.name == "picky" else None

    def build(self, graph, device, inputs, perm=None):
        if self.name == "refuses":
            raise self.outcome

    def attend(self, data, call):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return torch.full_like(call.query, self.outcome, dtype=call.out_dtype)


# Status and reason by name; the reason of a backend with wrong outputs is the script's own.
REASONS = {
    "absent": ("unavailable", "not on a weekday"),
    "picky": ("unsupported", "it takes no head dimension"),
    "refuses": ("unsupported", "needs 99 KB of shared memory"),
    "hungry": ("oom", "CUDA out of memory. Tried to allocate 9 GiB"),
    "buggy": ("error", "KeyError: 'rows'"),
}
BROKEN = (
    Broken("absent", 0.0),
    Broken("picky", 0.0),
    Broken("refuses", UnsupportedGraphError("needs 99 KB of shared memory")),
    Broken("hungry", torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")),
    Broken("buggy", KeyError("rows")),
    Broken("zero", 0.0),
    Broken("not_a_number", float("nan")),
)


def register_broken(monkeypatch) -> list[str]:
    """Add BROKEN to the registry for one test; return the names."""
    for backend in BROKEN:
        monkeypatch.setitem(REGISTRY, backend.name, backend)
    return [backend.name for backend in BROKEN]
