"""Errors that a caller can act on. Wrong arguments and damaged files are ValueErrors."""


class DatasetMissingError(FileNotFoundError):
    """A data set or file is missing and cannot be downloaded. The text names it, its place and the remedy."""


class DownloadError(DatasetMissingError):
    """A timeout, an error of the server, or an interrupted download: a later attempt may work.

    `source="auto"` does not take a surrogate for it, as it does without a network.
    """
