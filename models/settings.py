"""Arguments of the Graph Transformer, with their checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fused3s.arguments import check_integer, check_rate, check_word

Norm = Literal["layer", "batch"]
Task = Literal["node", "graph"]
EdgeFeatures = Literal["none", "bias", "stream"]
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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Shape and dropout of a `GraphTransformer`.

    Attributes:
        in_features: columns of float features, or the number of values of each categorical column.
        num_classes: outputs per node or graph.
        task: "node": output [N, num_classes]; "graph": mean over the nodes of each graph, output [G, num_classes].
        dim: width d, a multiple of `heads`. The paper times 64, 128 and 256.
        heads: attention heads. The paper times 1.
        blocks: transformer blocks.
        norm: "layer", or "batch" with running statistics in eval mode.
        pos_enc: number of Laplacian eigenvectors added to the input through a linear layer.
        random_walk: steps of the random-walk encoding added to the input through a batch norm and a linear layer.
        edge_features: "none", or the form in which edata["feat"] enters, "bias" or "stream"
            (see `models.graph_transformer`).
        edge_in_features: as `in_features`, for edges; only with edge features.
        dropout: rate on the embedding, on the output of attention and inside the FFN.
        attention_dropout: rate on the softmax weights.
        input_dropout: rate on float features.

    Raises:
        TypeError, ValueError: an argument is wrong; the text names it and what is allowed.
    """

    in_features: int | Sequence[int]
    num_classes: int
    task: Task = "node"
    dim: int = 128
    heads: int = 1
    blocks: int = 10
    norm: Norm = "layer"
    pos_enc: int = 0
    random_walk: int = 0
    edge_features: EdgeFeatures = "none"
    edge_in_features: int | Sequence[int] | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    input_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, (least, most) in SIZES.items():
            check_integer(name, getattr(self, name), least, most)
        for name, words in (("task", Task), ("norm", Norm), ("edge_features", EdgeFeatures)):
            check_word(name, getattr(self, name), get_args(words))
        for name in ("dropout", "attention_dropout", "input_dropout"):
            check_rate(name, getattr(self, name))
        if self.dim % self.heads:
            raise ValueError(f"dim: got {self.dim} with heads = {self.heads}; a multiple of heads is needed")
        _check_features("in_features", self.in_features)
        if self.edge_features != "none":
            if not self.edge_in_features:
                raise ValueError(
                    f"edge_in_features: got {self.edge_in_features} with edge_features = {self.edge_features!r}; the "
                    "columns of float features, or the number of values of each categorical column, are needed"
                )
            _check_features("edge_in_features", self.edge_in_features)


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
