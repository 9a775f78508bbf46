"""The one place that imports ogb."""

import importlib
from typing import Any

from data.errors import DatasetMissingError
from fused3s_dgl import import_dgl, ogb_keeps_offline


def import_ogb(module: str) -> Any:
    """`ogb.<module>`.

    Raises:
        DatasetMissingError: ogb is not installed, or a package that it needs is not.
    """
    try:
        import_dgl()  # which imports ogb, and must be made ready before ogb imports it
        with ogb_keeps_offline():
            return importlib.import_module(f"ogb.{module}")
    except ImportError as error:
        raise DatasetMissingError(
            f"its files are read by ogb, which cannot be imported ({error}); install ogb"
        ) from error
