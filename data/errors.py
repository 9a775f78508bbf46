"""The one error of this package that a caller can act on. Wrong arguments and damaged files are ValueErrors."""


class DatasetMissingError(FileNotFoundError):
    """A data set or file is not there and could not be had. The text says what was sought, where, and the remedy."""
