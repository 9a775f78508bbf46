"""Rank of this process, as set by a launcher such as torchrun."""

import os


class RankError(RuntimeError):
    """Ranks disagree, or one of them ended. The text names the rank and the reason."""


def is_launched() -> bool:
    """Whether a launcher such as torchrun started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"


def is_first_process() -> bool:
    """Whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def error_text(error: BaseException) -> str:
    """The text of an error, prefixed by the rank if there are several."""
    return f"rank {os.environ['RANK']}: {error}" if is_launched() and "RANK" in os.environ else str(error)
