"""Error that a caller can act on. Wrong arguments and damaged files are ValueErrors."""


class DatasetMissingError(FileNotFoundError):
    """A data set or file is missing and cannot be downloaded. The text names it, its place and the remedy."""
