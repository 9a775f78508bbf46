"""Table of data sets. To add one, add an entry, and a module in `data.sources` for a new format."""

from data.registry.batched import BATCHED
from data.registry.entry import Dataset, Published
from data.registry.masks import MASKS
from data.registry.single import SINGLE

__all__ = ["REGISTRY", "Dataset", "Published", "info", "names"]

REGISTRY: dict[str, Dataset] = {entry.name: entry for entry in (*SINGLE, *BATCHED, *MASKS)}


def names() -> tuple[str, ...]:
    """Registered names, in the order of the table."""
    return tuple(REGISTRY)


def info(name: str) -> Dataset:
    """The registry's entry for `name`.

    Raises:
        ValueError: `name` is not registered.
    """
    if not isinstance(name, str) or name not in REGISTRY:
        raise ValueError(
            f"name: got {name!r}; registered are {', '.join(REGISTRY)}. For a graph of your own pass path=, "
            "under any name"
        )
    return REGISTRY[name]
