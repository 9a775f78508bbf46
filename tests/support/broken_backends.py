"""Back ends that fail in every way, for the measuring scripts, and what their rows should say."""

import torch

from kernels import UnsupportedGraphError
from kernels.backends import REGISTRY
from kernels.backends.base import Backend


class Broken(Backend):
    """Raises, or gives this instead of the attention."""

    summary = "a back end of the tests"
    in_auto = False

    def __init__(self, name: str, outcome: Exception | float) -> None:
        self.name, self.outcome = name, outcome

    def unavailable(self, device):
        return "not on a weekday" if self.name == "absent" else None

    def unsupported(self, dtype, head_dim):
        return "it takes no head dimension" if self.name == "picky" else None

    def prepare(self, graph, device, dtype, head_dim):
        if self.name == "refuses":
            raise self.outcome

        def attend(query, key, value, scale, out_dtype):
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return torch.full(query.shape, self.outcome, dtype=out_dtype, device=device)

        return attend


# With the status and the reason of each; "wrong" ones have a reason that their script words.
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
    """Make BROKEN known for a test; their names."""
    for backend in BROKEN:
        monkeypatch.setitem(REGISTRY, backend.name, backend)
    return [backend.name for backend in BROKEN]
