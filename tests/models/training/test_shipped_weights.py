"""The weights in results/checkpoints are as accurate as they say."""

import pytest
import torch

import data
import fused3s
from configs import Config
from models.build import build_model
from models.metrics import score_on_test
from models.trained_weights import SHIPPED, find_weights, load_weights, read_about

CORA = [path for path in sorted(SHIPPED.glob("*.safetensors")) if read_about(path).data == "cora"]


@pytest.mark.parametrize("path", CORA, ids=lambda path: path.stem)
def test_cora_has_the_recorded_accuracy(path, tmp_path):
    about = read_about(path)
    config = Config.model_validate(about.config)
    loaded = data.load("cora", root=tmp_path, self_loops=config.data.self_loops)
    assert find_weights(config, loaded.meta)[0] == path
    model = build_model(config, loaded.meta, seed=1)
    load_weights(model, path, config, loaded.meta)
    plan = fused3s.plan_attention(loaded.graph, backend="csr_unfused", device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        logits = model.eval()(model.prepare(loaded.graph, plan))
    assert score_on_test(logits, loaded).value == pytest.approx(about.test, abs=0.002)  # two nodes: rounding elsewhere
