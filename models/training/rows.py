"""CSV rows of a run of `scripts/train.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from common.columns import dtype_name, run_columns
from common.records import Row
from common.timers import Spread
from models.training.errors import TrainingError
from models.training.log import LOG
from models.training.loop import Trainer

CURVE_POINTS = 40


def run_rows(trainer: Trainer, config_path: Path) -> list[Row]:
    """The metric of a finished run on the validation and the test split, the time of an epoch's steps, and that of the
    whole training."""
    result = trainer.result
    shared = _columns(trainer, config_path) | {
        "checkpoint": str(trainer.weights_path),
        "variant": f"seed {trainer.seed}",
        "note": f"epoch {result.best_epoch} of {result.epochs}",
    }
    measured = {
        f"valid_{result.metric}": (trainer.unit or "1", [result.valid]),
        f"test_{result.metric}": (trainer.unit or "1", [result.test]),
        "epoch_time": ("ms", [1e3 * seconds for seconds in result.seconds]),
        "training_time": ("s", [] if result.total_seconds is None else [result.total_seconds]),
    }
    return [
        Row(**shared, metric=metric, unit=unit, **Spread.of(values).columns())
        for metric, (unit, values) in measured.items()
        if values
    ]


def learning_curve(trainer: Trainer) -> pd.Series:
    """The metric of a finished run on the validation split, by epoch; after a log was moved away without the first."""
    path = trainer.folder / LOG
    try:
        curve = pd.read_csv(path, index_col="epoch")["valid_metric"]
    except (OSError, ValueError, LookupError):
        curve = pd.Series()
    if curve.empty:
        raise TrainingError(
            f"{path}: holds no learning curve of the finished run; put it back, or use another --output"
        )
    return curve


def curve_rows(trainer: Trainer, curves: Sequence[pd.Series], config_path: Path) -> list[Row]:
    """Up to CURVE_POINTS epochs, from the first that all have to the last, of the learning curves of several seeds, of
    which `trainer` ran one; a run that stopped early counts with its last value. metrics.csv has all epochs."""
    about = {"metric": f"valid_{trainer.result.metric}", "unit": trainer.unit or "1"}
    shared = _columns(trainer, config_path) | {"variant": f"{len(curves)} seeds"} | about
    rows = []
    first, last = max(curve.index[0] for curve in curves), max(curve.index[-1] for curve in curves)
    for epoch in np.linspace(first, last, min(last - first + 1, CURVE_POINTS)).round().astype(int):
        spread = Spread.of([curve[min(epoch, curve.index[-1])] for curve in curves])
        rows.append(Row(**shared, region=f"epoch {epoch}", **spread.columns()))
    return rows


def _columns(trainer: Trainer, config_path: Path) -> dict[str, Any]:
    return run_columns(
        *("train", config_path, trainer.config, trainer.meta, trainer.device),
        config_sha=trainer.config.recipe_sha(),
        dtype=dtype_name(trainer.precision),
        backend=trainer.backend,
        dense=trainer.dense,
        launch="cuda_graph" if trainer.captured else "eager",
        scope="model",
        status="unchecked",
        **trainer.columns(),
    )
