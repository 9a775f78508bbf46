"""Choice of the graphs of a collection that form the batch."""

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

import numpy as np

from data.features import check_splits

logger = logging.getLogger(__name__)

Order = Literal["dataset", "random"]
Split = Literal["train", "val", "test"]
ORDERS: tuple[str, ...] = get_args(Order)
SPLITS: tuple[str, ...] = get_args(Split)
PART_OF: dict[str, str] = {"train": "train", "val": "valid", "test": "test"}  # key of a split in `CsrGraph.splits`


@dataclass(frozen=True)
class Selection:
    """The first `batch_size` graphs of a split, in its own order or in a random one.

    Attributes:
        batch_size: number of graphs; None for all.
        order: "dataset", or "random": a permutation of the split, fixed by seed and name. A larger batch of the same
            seed contains the smaller one.
        split: "train", "val" or "test"; None for the choice of the published run, see each source.
        seed: seed of the random order.
        name: name of the data set.
        edge_features: whether those of the source are read.
    """

    batch_size: int | None = 1024
    order: Order = "dataset"
    split: Split | None = None
    seed: int = 0
    name: str = ""
    edge_features: bool = False

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order: got {self.order!r}; allowed are {', '.join(ORDERS)}")
        if self.split is not None and self.split not in SPLITS:
            raise ValueError(f"split: got {self.split!r}; allowed are None, {', '.join(SPLITS)}")
        for argument, least in (("batch_size", 1), ("seed", 0)):
            value = getattr(self, argument)
            if argument == "batch_size" and value is None:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(f"{argument}: got {value!r}; an integer is needed")
            if value < least:
                raise ValueError(f"{argument}: got {value}; {least} or more is allowed")

    @property
    def is_default(self) -> bool:
        """Whether order and split are those of the published run, of which a surrogate can be made."""
        return self.order == "dataset" and self.split is None and self.batch_size is not None

    def split_or(self, published: tuple[Split, ...]) -> tuple[Split, ...]:
        """The chosen split, else all of them for the whole collection, else the `published` ones."""
        if self.split:
            return (self.split,)
        return SPLITS if self.batch_size is None else published

    def pick(self, count: int, place: str, splits: Mapping[str, np.ndarray] | None = None) -> tuple[np.ndarray, int]:
        """The chosen graphs of a collection of `count`, and from how many they were chosen.

        Args:
            place: of the collection, for messages.
            splits: ids of the graphs of each part; None: the collection has no split to choose from.

        Returns:
            [batch_size] int64 ids of graphs of the split, of the collection without one; the number of graphs there.

        Raises:
            ValueError: there are fewer graphs, or the splits hold other numbers, or one twice.
        """
        graphs = np.arange(count)
        if splits is not None:
            check_splits(place, splits, count)
            if self.split:
                graphs, place = splits[PART_OF[self.split]], f"{place}, {self.split}"
        size = graphs.size if self.batch_size is None else self.batch_size
        if size == Selection.batch_size > graphs.size:  # nobody asked for so many
            logger.info("%s has %d graphs, fewer than a batch of %d: all are taken", place, graphs.size, size)
            size = graphs.size
        if size > graphs.size:
            raise ValueError(
                f"batch_size: got {self.batch_size}; {place} has {graphs.size} graphs. Set batch_size (data.batch_size "
                f"times data.batches in a configuration) to {graphs.size} or less, or take all (data.batches: all)"
            )
        if self.order == "random":
            rng = np.random.default_rng([self.seed, zlib.crc32(f"{self.name}/order".encode())])
            return graphs[rng.permutation(graphs.size)[:size]], graphs.size
        return graphs[:size], graphs.size

    def described(self, origin: str) -> str:
        """`origin`, followed by the choices that differ from the published run."""
        choices = {
            f"{self.split} split": self.split is not None,
            "all graphs": self.split is None and self.batch_size is None,
            f"random order of seed {self.seed}": self.order == "random",
        }
        words = ", ".join(text for text, differs in choices.items() if differs)
        return f"{origin} ({words})" if words else origin


def renumbered(splits: Mapping[str, np.ndarray], picked: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """The split of the picked graphs, by their places in the batch.

    Args:
        splits: ids of the graphs of each part.
        picked: [B] int64, the ids of the batch's graphs.
        count: graphs of the collection.
    """
    place = np.full(count, -1)
    place[picked] = np.arange(picked.size)
    places = {part: place[ids] for part, ids in splits.items()}
    return {part: ids[ids >= 0] for part, ids in places.items()}


def refuse(selection: Selection, why: str, options: Sequence[str] = ("order", "split")) -> None:
    """Raise a ValueError with the reason if one of these options is set."""
    for option in options:
        value, default = getattr(selection, option), getattr(Selection, option)
        if value != default:
            allowed = f"only {default!r} is allowed (data.{option} in a configuration)"
            raise ValueError(f"{option}: got {value!r}; {why}: {allowed}")
