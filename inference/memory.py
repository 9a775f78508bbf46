"""Exhausted memory as a message that names the step and what makes it smaller."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bench.memory import is_out_of_memory
from configs import Config
from data import GraphMeta


class OutOfMemoryError(MemoryError):
    """The text names the step, the bytes asked for where they are known, and remedies."""


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


def data_remedies(config: Config) -> str:
    if config.data.reads_file:
        return (
            "for a collection of small graphs, order dataset and features in the file; a machine with more memory; or "
            "correct the file, if its node count or labels are not what they should be"
        )
    return "fewer graphs (data.batch_size, data.batches) of a collection, a smaller graph, a machine with more memory"


def model_remedies(config: Config, meta: GraphMeta) -> str:
    model = config.model
    encoding = f", model.pos_enc = {model.pos_enc}" if model.pos_enc else ""
    return (
        f"make the largest of these smaller: model.dim = {model.dim}, model.blocks = {model.blocks}{encoding}; the "
        f"data set has {meta.feature_dim:,} columns of features and {meta.num_classes:,} outputs, which a wrong "
        "label can make too many"
    )


def run_remedies(config: Config, meta: GraphMeta, dtype: torch.dtype) -> str:
    model = config.model
    batch_size = config.data.graphs_per_batch(meta.num_graphs, meta.num_nodes)
    remedies = [f"a smaller data.batch_size than {batch_size}"] if meta.num_graphs > 1 else []
    remedies += [f"a smaller model.pos_enc than {model.pos_enc}"] if model.pos_enc > 64 else []
    remedies.append(f"a smaller model.dim than {model.dim}")
    remedies += ["attention.dtype: float16 or bfloat16"] if dtype == torch.float32 else []
    return ", ".join(remedies)
