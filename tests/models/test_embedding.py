"""Packed embedding against the plain module, for floats and for categories."""

import numpy as np
import pytest
import torch

from models.embedding import FeatureEmbedding, embed_one_hot, pack_embedding

FEATURES = {
    "floats": {"columns": 6},
    "one_float": {"columns": 1},
    "categories": {"cardinalities": (5, 119, 2)},
}


@pytest.mark.parametrize("dim", [5, 64])  # 5: rows of the result are not whole 16 bytes
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_packed_is_plain(make_graph, make_model, options, dim):
    model = make_model(in_features=options.get("cardinalities") or options["columns"], dim=dim)
    inputs = model.prepare(make_graph(**options), attention=None)
    with torch.inference_mode():
        embedded = pack_embedding(model.embedding)(inputs)
        assert embedded.is_contiguous()
        torch.testing.assert_close(embedded, model.embed(inputs), rtol=1e-5, atol=1e-5)


def test_one_hot_rows_and_their_gradient_are_those_of_a_table_in_float64():
    cardinalities = (3, 1, 2)
    torch.manual_seed(0)
    layer = FeatureEmbedding(cardinalities, 8)
    features = torch.stack([torch.randint(values, (50,)) for values in cardinalities], 1)
    weights = torch.randn(50, 8)
    (gradient,) = torch.autograd.grad((embed_one_hot(layer, features) * weights).sum(), layer.table.weight)
    table, first = layer.table.weight.detach().double(), np.cumsum([0, *cardinalities[:-1]])
    rows = features.numpy() + first
    torch.testing.assert_close(embed_one_hot(layer, features).double(), table[rows].sum(1), atol=1e-5, rtol=0)
    expected = np.zeros(table.shape)
    for column in rows.T:
        np.add.at(expected, column, weights.double().numpy())
    torch.testing.assert_close(gradient.double(), torch.from_numpy(expected), atol=1e-5, rtol=0)
