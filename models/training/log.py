"""The log of a run, one row per epoch: metrics.csv, and the same for TensorBoard."""

import csv
import io
import logging
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter

from data.atomic import replacing, writing
from models.training.errors import TrainingError

logger = logging.getLogger(__name__)


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

        self._folder, path = folder, folder / LOG
        if done and not path.is_file():
            logger.warning("%s: missing; the epochs up to %d are in no log", path, done)
        rows = _rows(path, done) if done and path.is_file() else []
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
        with replacing(path) as unfinished:
            unfinished.write_text(text.getvalue(), encoding="utf-8")
        with writing(folder):
            self._file = path.open("a", newline="", encoding="utf-8")
            self._rows = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
            self._board = SummaryWriter(folder / "tensorboard", purge_step=done + 1 if done else None)

    def add(self, record: EpochRecord) -> None:
        with writing(self._folder):
            self._rows.writerow(asdict(record))
            self._file.flush()
            for name in SCALARS:
                self._board.add_scalar(name, getattr(record, name), record.epoch)

    def add_test(self, metric: float, epoch: int) -> None:
        """The test metric of the kept weights, those of `epoch`, for TensorBoard."""
        self._board.add_scalar("test_metric", metric, epoch)

    def flush(self) -> None:
        with writing(self._folder):
            os.fsync(self._file.fileno())
            self._board.flush()

    def close(self) -> None:
        with writing(self._folder):
            self._file.close()
            self._board.close()


def is_log(path: Path) -> bool:
    """Whether a file, if there is one, has the header of a log, or its beginning."""
    if not path.is_file():
        return not path.exists()
    with path.open("rb") as file:
        header = ",".join(COLUMNS).encode()
        first = file.readline(len(header) + 2).rstrip(b"\r\n")
    return header.startswith(first)


def _rows(path: Path, done: int) -> list[EpochRecord]:
    """Rows of the epochs up to `done`, of which the first may be missing.

    Raises:
        TrainingError: the file is damaged.
    """
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")  # a kill may leave half a row
        cells = [row for row in csv.DictReader(whole.splitlines(), strict=True) if int(row["epoch"]) <= done]
        rows = [_ROW.validate_strings(row) for row in cells]
        epochs = [row.epoch for row in rows]
        if epochs != [*range(done - len(rows) + 1, done + 1)]:
            raise ValueError(f"its epochs are {epochs}, and the state of the run is after epoch {done}")
        return rows
    except (ValueError, LookupError, TypeError, csv.Error) as error:
        reason = str(error).replace("\n", " ")
        raise TrainingError(f"{path}: damaged ({reason}); move it away to continue without it") from error


_ROW = TypeAdapter(EpochRecord)
