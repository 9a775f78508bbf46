"""Which graphs of a collection make the batch."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

Order = Literal["dataset", "random"]
Split = Literal["train", "val", "test"]
ORDERS: tuple[str, ...] = get_args(Order)
SPLITS: tuple[str, ...] = get_args(Split)


@dataclass(frozen=True)
class Selection:
    """The first `batch_size` graphs of a split, in its own order or in a random one.

    Attributes:
        batch_size: how many.
        order: "dataset", or "random": a permutation of the split that the seed and the name decide, so that a larger
            batch holds the smaller one of the same seed.
        split: "train", "val" or "test"; None is what the published run used, see each source.
        seed: of the random order.
        name: of the data set.
    """

    batch_size: int = 1024
    order: Order = "dataset"
    split: Split | None = None
    seed: int = 0
    name: str = ""

    @property
    def is_default(self) -> bool:
        """Whether it is the published run's choice, batch size aside."""
        return self.order == "dataset" and self.split is None

    def pick(self, count: int, what: str) -> np.ndarray:
        """[batch_size] int64, which of the `count` graphs of the split make the batch.

        Raises:
            ValueError: there are fewer.
        """
        if self.batch_size > count:
            raise ValueError(
                f"batch_size: got {self.batch_size}; {what} has {count} graphs. Set batch_size (data.batch_size in a "
                f"configuration) to {count} or less"
            )
        if self.order == "dataset":
            return np.arange(self.batch_size)
        rng = np.random.default_rng([self.seed, zlib.crc32(f"{self.name}/order".encode())])
        return rng.permutation(count)[: self.batch_size]

    def described(self, origin: str) -> str:
        """`origin`, and what of the selection is not the published run's."""
        said = {
            f"{self.split} split": self.split is not None,
            f"random order of seed {self.seed}": self.order == "random",
        }
        words = ", ".join(words for words, holds in said.items() if holds)
        return f"{origin} ({words})" if words else origin


def refusal(selection: Selection, allowed: Mapping[str, bool], why: str) -> str | None:
    """What to say if an option is not its default where `allowed` does not have it; None if nothing is wrong."""
    for option, default in (("order", "dataset"), ("split", None)):
        value = getattr(selection, option)
        if value != default and not allowed.get(option, False):
            return f"{option}: got {value!r}; {why}: only {default!r} is allowed (data.{option} in a configuration)"
    return None
