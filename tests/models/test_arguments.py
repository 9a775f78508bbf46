"""Bad arguments of the model: each error names what is wrong and what to do."""

import pytest

from models import GraphTransformer


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"norm": "lyer"}, ValueError, "norm: got 'lyer'; allowed are 'layer', 'batch'"),
        ({"task": "nodes"}, ValueError, "task: got 'nodes'; allowed are 'node', 'graph'"),
        ({"edge_features": "edges"}, ValueError, "edge_features: got 'edges'"),
        ({"edge_features": "bias"}, ValueError, "edge_in_features: got None with edge_features = 'bias'"),
        ({"blocks": 0}, ValueError, "blocks: got 0; 1 to 10,000"),
        ({"blocks": 2.5}, TypeError, "blocks: got 2.5; an integer"),
        ({"num_classes": True}, TypeError, "num_classes: got True"),
        ({"pos_enc": -1}, ValueError, "pos_enc: got -1; 0 to 1,024"),
        ({"dim": 2}, ValueError, "dim: got 2; 4 to 65,536"),
        ({"heads": 3}, ValueError, "dim: got 8 with heads = 3; a multiple of heads"),
        ({"in_features": []}, ValueError, "in_features: got no column"),
        ({"in_features": "12"}, TypeError, "in_features: got '12'"),
        ({"dropout": "a"}, TypeError, "dropout: got 'a'; a rate"),
        ({"attention_dropout": 1.0}, ValueError, "attention_dropout: got 1.0; a rate from 0 to below 1 is needed"),
        ({"input_dropout": float("nan")}, ValueError, "input_dropout: got nan; a rate"),
    ],
)
def test_models(arguments, error, message):
    with pytest.raises(error, match=message):
        GraphTransformer(**({"in_features": 4, "num_classes": 2, "dim": 8, "blocks": 1} | arguments))
