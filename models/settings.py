"""Checks of the arguments of models."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from fused3s.arguments import check_integer, check_rate, check_word

Norm = Literal["layer", "batch"]
Task = Literal["node", "graph"]
EdgeFeatures = Literal["none", "bias", "stream"]
Features = int | Sequence[int]  # columns of float features, or the number of values of each categorical column
WORDS = {"norm": Norm, "task": Task, "edge_features": EdgeFeatures}
MOST_FEATURES = 10_000_000
# Smallest and largest value. Larger ones are mistakes that would otherwise fail in an unnamed allocation.
SIZES = {
    "num_classes": (1, 1_000_000),
    "dim": (4, 65_536),
    "heads": (1, 65_536),
    "blocks": (1, 10_000),
    "pos_enc": (0, 1_024),
    "random_walk": (0, 1_024),
}


def check_settings(**given: Any) -> None:
    """Raise a TypeError or ValueError that names the wrong argument of a model and what is allowed."""
    for name, value in given.items():
        if name in SIZES:
            check_integer(name, value, *SIZES[name])
        elif name in WORDS:
            check_word(name, value, get_args(WORDS[name]))
        elif name.endswith("dropout"):
            check_rate(name, value)
    if given["dim"] % given["heads"]:
        raise ValueError(f"dim: got {given['dim']} with heads = {given['heads']}; a multiple of heads is needed")
    _check_features("in_features", given["in_features"])
    if given.get("edge_features", "none") != "none":
        found = given["edge_in_features"]
        if not found:
            raise ValueError(
                f"edge_in_features: got {found} with edge_features = {given['edge_features']!r}; the columns of float "
                "features, or the number of values of each categorical column, are needed"
            )
        _check_features("edge_in_features", found)


def _check_features(name: str, features: object) -> None:
    """Raise unless these are the columns of float features, or the numbers of values of categorical ones."""
    if isinstance(features, (str, bytes)) or not isinstance(features, (int, Sequence)):
        raise TypeError(
            f"{name}: got {features!r}; the columns of float features, or the number of values of each categorical "
            "column, are needed"
        )
    values = [features] if isinstance(features, int) else list(features)
    if not values:
        raise ValueError(f"{name}: got no column; at least one is needed")
    for value in values:
        check_integer(name, value, 1, MOST_FEATURES)
