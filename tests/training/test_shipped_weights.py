"""The weights in results/checkpoints: small, complete, and as accurate as they say."""

import dataclasses
import json

import pytest
import torch

import data
import kernels
from configs import Config
from training import load_weights
from training.metrics import score_on_test
from training.setup import build_model
from training.weights import SHIPPED, find_weights, read_about

FILES = sorted(SHIPPED.glob("*.safetensors"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_size_and_json_file(path):
    assert path.stat().st_size < 2**21
    assert json.loads(path.with_suffix(".json").read_text()) == dataclasses.asdict(read_about(path))


@pytest.mark.parametrize(
    "path", [path for path in FILES if read_about(path).data == "cora"], ids=lambda path: path.stem
)
def test_cora_has_the_recorded_accuracy(path, tmp_path):
    about = read_about(path)
    config, loaded = Config.model_validate(about.config), data.load("cora", root=tmp_path)
    assert find_weights(config, loaded.meta).path == path
    model = build_model(config, loaded.meta, seed=1)
    load_weights(model, path, config, loaded.meta)
    plan = kernels.plan_attention(loaded.graph, backend="csr_unfused", device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        logits = model.eval()(model.prepare(loaded.graph, plan))
    assert score_on_test(logits, loaded).value == pytest.approx(about.test, abs=0.002)  # two nodes: rounding elsewhere
