"""Errors of this package."""


class PartitionError(ValueError):
    """A graph cannot be divided, or its partition is damaged. The text says what to do."""


class RankError(RuntimeError):
    """Ranks disagree, or one of them ended. The text names the rank and the reason."""
