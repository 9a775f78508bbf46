"""Errors that a caller can act on. Wrong arguments and damaged files are ValueErrors."""


class DatasetMissingError(FileNotFoundError):
    """A data set or file is missing and cannot be downloaded. The text names it, its place and the remedy."""


class DownloadError(DatasetMissingError):
    """A publisher answered too late or with an error of its own, or a download broke off: it may work later.

    `source="auto"` does not take a surrogate for it, as it does without a network.
    """


class RectangularGraphError(ValueError):
    """The keys of a graph are other nodes than its queries, and one set of nodes is needed."""
