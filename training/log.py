"""The log of a run, one row per epoch: metrics.csv, and the same for TensorBoard."""

import csv
import io
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd

from data.atomic import replacing
from training.errors import TrainingError


@dataclass(frozen=True)
class EpochRecord:
    """One epoch.

    Attributes:
        epoch: number of the epoch, from 1.
        lr: learning rate of the last step.
        loss: mean training loss over the steps.
        valid_loss, valid_metric: validation loss and metric after the epoch.
        seconds: time of the training steps in seconds, without evaluation.
        is_best: whether the validation metric is the best so far.
    """

    epoch: int
    lr: float
    loss: float
    valid_loss: float
    valid_metric: float
    seconds: float
    is_best: bool


LOG = "metrics.csv"
COLUMNS = tuple(field.name for field in fields(EpochRecord))
SCALARS = ("lr", "loss", "valid_loss", "valid_metric", "seconds")


class TrainingLog:
    """Appends to the log in a folder. Removes rows after epoch `done`, which a resumed run computes again."""

    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # the package tensorboard

        path = folder / LOG
        rows = []
        if done and path.is_file():
            try:
                table = pd.read_csv(path, usecols=COLUMNS, dtype=str).dropna()  # a kill may leave half a row
                rows = table[table["epoch"].astype(int) <= done].to_dict("records")
            except ValueError as error:
                raise TrainingError(f"{path}: damaged ({error}); move it away to continue without it") from error
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        with replacing(path) as unfinished:
            unfinished.write_text(text.getvalue(), encoding="utf-8")
        self._file = path.open("a", newline="", encoding="utf-8")
        self._rows = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
        self._board = SummaryWriter(folder / "tensorboard", purge_step=done + 1 if done else None)

    def add(self, record: EpochRecord) -> None:
        self._rows.writerow(asdict(record))
        self._file.flush()
        for name in SCALARS:
            self._board.add_scalar(name, getattr(record, name), record.epoch)

    def add_test(self, metric: float, epoch: int) -> None:
        """The test metric of the kept weights, those of `epoch`, for TensorBoard."""
        self._board.add_scalar("test_metric", metric, epoch)

    def flush(self) -> None:
        self._board.flush()

    def close(self) -> None:
        self._file.close()
        self._board.close()
