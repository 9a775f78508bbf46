"""CSV rows of a run of `scripts/train.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bench.provenance import provenance
from bench.records import Row
from bench.runner import dtype_name, graph_columns
from bench.timers import Spread
from training import Trainer
from training.log import LOG


def run_rows(trainer: Trainer, config_path: Path) -> list[Row]:
    """The metric of a finished run on the validation and the test split, and the time of an epoch's steps."""
    result = trainer.result
    shared = _columns(trainer, config_path) | {
        "checkpoint": str(trainer.weights_path),
        "variant": f"seed {trainer.seed}",
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


def learning_curve(trainer: Trainer) -> list[float]:
    """The metric of a finished run on the validation split after each epoch."""
    return pd.read_csv(trainer.folder / LOG)["valid_metric"].tolist()


def curve_rows(trainer: Trainer, config_path: Path, curves: Sequence[list[float]]) -> list[Row]:
    """The learning curves of several seeds; one that stopped early counts with its last value.

    Args:
        trainer: of one of the seeds.
    """
    shared = _columns(trainer, config_path) | {"variant": f"{len(curves)} seeds"}
    rows = []
    for epoch in range(max(map(len, curves))):
        spread = Spread.of([curve[min(epoch, len(curve) - 1)] for curve in curves])
        columns = {"region": f"epoch {epoch + 1}", "metric": f"valid_{trainer.result.metric}", "unit": "1"}
        rows.append(Row(**shared, **columns, **spread.columns()))
    return rows


def _columns(trainer: Trainer, config_path: Path) -> dict[str, Any]:
    model = trainer.config.model
    return {
        **provenance(trainer.device).model_dump(),
        **graph_columns(trainer.meta),
        "bench": "train",
        "config": str(config_path),
        "config_sha": trainer.config.sha(),
        "dim": model.dim,
        "heads": model.heads,
        "blocks": model.blocks,
        "edges": model.edge_features,
        "dtype": dtype_name(trainer.precision),
        "backend": trainer.backend,
        "order": trainer.config.attention.reorder,
        "dense": trainer.dense,
        "launch": "cuda_graph" if trainer.captured else "eager",
        "scope": "model",
        "status": "unchecked",
    }
