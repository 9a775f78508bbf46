"""Exhausted memory as a message that names the step and what makes it smaller."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from common.memory import is_out_of_memory
from configs import Config


class OutOfMemoryError(MemoryError):
    """The text names the step, the bytes asked for where they are known, and remedies."""


@contextmanager
def memory_for(step: str, config: Config) -> Iterator[None]:
    """Turn exhausted memory inside the block, whose work is `step`, into an OutOfMemoryError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        reason = f"{int(asked[1]):,} bytes were asked for at once" if asked else str(error).partition("\n")[0]
        model, attention = config.model, config.attention
        remedies = (
            f"smaller values of data.batch_size = {config.data.batch_size}, model.dim = {model.dim}, model.blocks = "
            f"{model.blocks} or model.pos_enc = {model.pos_enc}; 16 bits (attention.dtype = {attention.dtype}); a "
            "smaller graph, or a machine with more memory"
        )
        if config.data.reads_file:
            remedies += "; is the number of nodes or a label in the file wrong?"
        raise OutOfMemoryError(f"out of memory while {step}: {reason}\nremedies: {remedies}") from error
