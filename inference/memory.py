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
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        reason = f"{int(asked[1]):,} bytes were asked for at once" if asked else str(error).partition("\n")[0]
        raise OutOfMemoryError(f"out of memory while {step}: {reason}\nremedies: {remedies()}") from error


def data_remedies(config: Config) -> str:
    if config.data.reads_file:
        return "a machine with more memory; check the node count and the labels of the file"
    return "fewer graphs (data.batch_size, data.batches) of a collection, a smaller graph, a machine with more memory"


def model_remedies(config: Config, meta: GraphMeta) -> str:
    model = config.model
    return (
        f"smaller model.dim = {model.dim}, model.blocks = {model.blocks} or model.pos_enc = {model.pos_enc}; this data "
        f"set has {meta.feature_dim:,} feature columns and {meta.num_classes:,} outputs, too many if labels are wrong"
    )


def run_remedies(config: Config, meta: GraphMeta, dtype: torch.dtype) -> str:
    batch_size = config.data.graphs_per_batch(meta.num_graphs, meta.num_nodes)
    remedies = [f"a smaller data.batch_size than {batch_size}"] if meta.num_graphs > 1 else []
    remedies.append(f"a smaller model.dim than {config.model.dim}")
    return ", ".join(remedies + ["attention.dtype: float16 or bfloat16"] * (dtype == torch.float32))
