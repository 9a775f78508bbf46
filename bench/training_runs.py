"""CSV rows of a run of `scripts/train.py`."""

from pathlib import Path

from bench.provenance import provenance
from bench.records import Row
from bench.runner import dtype_name, graph_columns
from bench.timers import Spread
from training import Trainer


def run_rows(trainer: Trainer, config_path: Path) -> list[Row]:
    """The metric of a finished run on the validation and the test split, and the time of an epoch's steps."""
    model, result = trainer.config.model, trainer.result
    shared = {
        **provenance(trainer.device).model_dump(),
        **graph_columns(trainer.meta),
        "bench": "train",
        "config": str(config_path),
        "config_sha": trainer.config.sha(),
        "checkpoint": str(trainer.weights_path),
        "dim": model.dim,
        "heads": model.heads,
        "blocks": model.blocks,
        "edges": model.edge_features,
        "dtype": dtype_name(trainer.precision),
        "backend": trainer.backend,
        "order": trainer.config.attention.reorder,
        "dense": "compiled" if trainer.config.runtime.dense == "compiled" else "plain",
        "launch": "cuda_graph" if trainer.captured else "eager",
        "variant": f"seed {trainer.seed}",
        "scope": "model",
        "status": "unchecked",
        "note": f"epoch {result.best_epoch} of {result.epochs}",
    }
    measured = {
        f"valid_{result.metric}": ("1", [result.valid]),
        f"test_{result.metric}": ("1", [result.test]),
        "epoch_time": ("ms", [1e3 * seconds for seconds in result.seconds]),
    }
    return [
        Row(**shared, metric=metric, unit=unit, **Spread.of(values).columns())
        for metric, (unit, values) in measured.items()
        if values
    ]
