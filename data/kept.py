"""Surrogates that are expensive to make, kept in files."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.atomic import replacing
from data.graph import CsrGraph

logger = logging.getLogger(__name__)


def kept_path(folder: Path, stem: str, recipe: str) -> Path:
    """Place of the graph that `recipe` describes: all inputs that determine it."""
    return folder / f"{stem}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.npz"


def kept_graph(path: Path, recipe: str, make: Callable[[], CsrGraph]) -> CsrGraph:
    """The kept graph, else a new one, which is kept. A disk that is full or read-only costs a warning.

    Raises:
        ValueError: the file is damaged, or was made of something else.
    """
    if path.exists():
        try:
            with np.load(path, allow_pickle=False) as arrays:
                if str(arrays["recipe"]) != recipe:
                    raise ValueError(f"made of other inputs: {arrays['recipe']}")
                sizes = arrays.get("graph_sizes")
                about = str(arrays["sha256"]), str(arrays["origin"])
                return CsrGraph(arrays["indptr"], arrays["col"], *about, graph_sizes=sizes)
        except Exception as error:  # whatever zipfile and NumPy raise
            raise ValueError(f"{path}: cannot be used ({error}); delete it, and it is made again") from error
    graph = make()
    arrays = {"recipe": recipe, "indptr": graph.indptr, "col": graph.col, "sha256": graph.sha256}
    arrays["origin"] = graph.origin
    if graph.graph_sizes is not None:
        arrays["graph_sizes"] = graph.graph_sizes
    try:
        with replacing(path) as unfinished:
            np.savez(unfinished, **arrays)
    except OSError as error:
        logger.warning("%s: not kept (%s): the next run makes it again", path, error)
    return graph
