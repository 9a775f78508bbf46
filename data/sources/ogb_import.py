"""The only import of ogb."""

import importlib
from typing import Any

from data.dgl import import_dgl, ogb_offline
from data.errors import DatasetMissingError


def import_ogb(module: str) -> Any:
    """`ogb.<module>`.

    Raises:
        DatasetMissingError: ogb, or a package that it needs, is not installed.
    """
    try:
        import_dgl()  # ogb imports DGL, which may need preparation first
        with ogb_offline():
            return importlib.import_module(f"ogb.{module}")
    except ImportError as error:
        raise DatasetMissingError(
            f"its files are read by ogb, which cannot be imported ({error}); install ogb"
        ) from error
