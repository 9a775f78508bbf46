"""Errors of this package."""


class PartitionError(ValueError):
    """A partition is missing, unfinished, damaged, or of another graph or number of ranks. The text says what to do."""


class CollectionError(ValueError):
    """A collection of graphs where one graph is needed."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name}: is a collection of graphs; a partition is of one graph (of a collection each rank takes a share "
            "of the batches, without a partition)"
        )
