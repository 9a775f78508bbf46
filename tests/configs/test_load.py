"""Configurations: the shipped ones load; an error names the key, its value and what is allowed."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import data
from configs import Config, ConfigError, TrainConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
INFER = ROOT / "configs" / "infer"


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "my.yaml"
        path.write_text(text)
        return path

    return write


def problems(path: Path, *overrides: str, schema: type = Config) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, schema)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(INFER.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_load(path):
    assert load_config(path).data.name in data.names()


def test_overrides_win_and_large_graphs_have_their_own_passes(write):
    path = write("data: {name: cora}\nmodel: {dim: 64}\nattention:\n")
    config = load_config(path, ["model.dim=32", "attention.reorder=auto", "data.name=reddit", "runtime.warmup=2"])
    assert (config.model.dim, config.attention.reorder, config.data.name) == (32, "auto", "reddit")
    assert (config.runtime.warmup, config.runtime.repeats) == (2, data.info("reddit").repeats)


def test_numbers_and_switches_as_people_write_them(write):
    path = write("data: {name: cora}\nruntime: {cuda_graph: off}\ntraining: {lr: 1e-3, weight_decay: 5E-4}")
    config = load_config(path, ["training.clip_norm=2e+1", "model.checkpoint=null"])
    assert (config.training.lr, config.training.weight_decay, config.training.clip_norm) == (0.001, 0.0005, 20.0)
    assert (config.runtime.cuda_graph, config.model.checkpoint) == (False, None)


def test_the_sha_is_that_of_the_resolved_values(write):
    path = write("data: {name: cora}\nmodel: {dim: 64}\n")
    config = load_config(path)
    assert load_config(path, ["model.heads=1"]).sha() == config.sha() != load_config(path, ["model.heads=2"]).sha()
    with pytest.raises(ValidationError, match="frozen"):
        config.model.dim = 32


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "model.head=4",
            ["model.head = 4", "no such key", "did you mean 'heads'", "kind, dim, heads, out_heads, blocks"],
        ),
        ("modle.dim=64", ["modle", "did you mean 'model'", "data, model, attention, runtime"]),
        ("model.norm=layr", ["model.norm = 'layr'", "did you mean 'layer'", "'layer' or 'batch'"]),
        ("model.heads='4'", ["model.heads = '4'", "valid integer"]),
        ("model.heads=3", ["model.dim = 128 and model.heads = 3", "multiple of heads"]),
        ("data.name=coar", ["data.name = 'coar'", "did you mean 'cora'", "pubmed", "data.source: file"]),
        ("data.name=../../evil", ["data.name = '../../evil'", "without /"]),
        ("data.batch_size=0", ["data.batch_size = 0", "greater than or equal to 1", "allowed are 'auto'"]),
        ("attention.backend=fused3s_papr", ["attention.backend = 'fused3s_papr'", "did you mean 'fused3s_paper'"]),
        ("runtime.device=gpu", ["runtime.device = 'gpu'", "auto|cpu|cuda"]),
        ("training.lr=1e300", ["training.lr = 1e+300", "less than or equal"]),
        ("training.weight_decay=1e39", ["training.weight_decay = 1e+39", "less than or equal"]),
        ("training.seeds=[1, 1]", ["training.seeds = [1, 1]", "once"]),
        ("data.split=test", ["data.split = 'test' and data.name = 'cora'", "single graph; only null"]),
        ("data.path=''", ["data.path = ''", "at least 1 character"]),
        ("data.path=a.npz", ["data.source = 'official' and data.path = 'a.npz'"]),
        ("runtime.partition=heads", ["runtime.partition = 'heads'", "no longer a key", "leave it out"]),
        ("model.dim", ["section.key=value"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(write, override, parts):
    text = problems(write("data: {name: cora, source: official}\n"), override)
    for part in [f"--set {override}", *parts]:
        assert part in text


@pytest.mark.parametrize(
    ("overrides", "both"),
    [
        (["data.order=random", "data.source=synthetic"], "data.order = 'random' and data.source = 'synthetic'"),
        (["data.split=val", "data.path=a.npz"], "data.split = 'val' and data.source = 'auto', data.path = 'a.npz'"),
        (
            ["data.batches=2", "runtime.cuda_graph=true", "model.pos_enc=2"],
            "runtime.cuda_graph = True and data.batches",
        ),
        (["runtime.dense=fused", "model.norm=batch"], "runtime.dense = 'fused' and model.norm = 'batch'"),
        (["model.kind=gat_conv", "model.norm=batch"], "model.norm = 'batch' and model.kind = 'gat_conv'"),
        (["model.out_heads=2"], "model.out_heads = 2 and model.kind = 'graph_transformer'"),
        (["model.kind=gat_conv"], "model.kind = 'gat_conv' and data.name = 'zinc'"),
        (["model.kind=gat_conv", "runtime.dense=compiled"], "runtime.dense = 'compiled' and model.kind = 'gat_conv'"),
        (
            ["data.self_loops=true", "model.edge_features=bias"],
            "data.self_loops = True and model.edge_features = 'bias'",
        ),
    ],
)
def test_values_that_exclude_each_other_are_both_named(write, overrides, both):
    assert both in problems(write("data: {name: zinc}\n"), *overrides)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("runtime.dense=fused", "runtime.dense = 'fused': this kernel is for inference"),
        ("model.checkpoint=w.pt", "model.checkpoint = 'w.pt': training starts from random weights"),
        ("data.order=random", "data.order = 'random': training shuffles"),
        ("data.batches=all", "data.batch_size = 'auto': training needs a number"),
        ("training.sampler=neighbor model.random_walk=3", "model.random_walk = 3 and training.sampler = 'neighbor'"),
        ("training.sampler=neighbor", "training.sampler = 'neighbor' and data.name = 'zinc': a collection"),
        ("training.fan_out=[5]", "training.fan_out = [5] and training.sampler = 'none': use neighbor"),
    ],
)
def test_what_training_does_not_take(write, override, part):
    assert part in problems(write("data: {name: zinc}\n"), *override.split(), schema=TrainConfig)


def test_all_problems_come_at_once(write):
    text = problems(write("data:\n  nam: cora\nmodel:\n  norm: none\n"), "runtime.repeats=no", "training.lr=-1")
    for part in ("5 problems", "data.name: is missing", "data.nam = 'cora'", "model.norm", "runtime.repeats = False"):
        assert part in text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("data: [", "YAML"),
        ("", "data: is missing"),
        ("data: !!python/object/apply:os.getcwd []", "python/object"),
        ("data: {name: cora}\nmodel: {dim: 64, dim: 128}", "dim is given twice"),
        *((f"data: {{name: cora}}\n{key}: 2", "no text") for key in ("1", "~", "2026-01-02", ".nan", "!!binary YQ==")),
        *((text, "no keys") for text in ("[1, 2]", "3", "!!set {a}", "!!pairs [a: 1]")),
        ("[data]\nname = 'cora'", "YAML"),
    ],
)
def test_a_file_that_is_no_configuration(write, text, part):
    assert part in problems(write(text))
    assert part in problems(write(text), "model.dim=64")


def test_a_recipe_is_all_that_a_score_depends_on_but_the_seed(write):
    def recipe(*changes):
        return load_config(write("data: {name: cora}\nmodel: {blocks: 2}"), changes, TrainConfig).recipe_sha()

    same = ["training.seeds=[1, 2]", "runtime.seed=3", "data.root=/elsewhere", "data.source=official"]
    same += ["runtime.device=cuda:1", "attention.backend=auto", "training.precision=float32", "model.blocks=2"]
    same += ["training.checkpoint_seconds=1", "model.checkpoint=null", "attention.dtype=float32", "runtime.repeats=7"]
    assert {recipe(change) for change in same} == {recipe()}
    others = ["training.lr=0.1", "training.ema=0.9", "model.dim=64", "data.self_loops=true", "data.batch_size=7"]
    others += ["attention.reorder=auto", "training.epochs=7", "model.blocks=3"]
    assert len({recipe(), *map(recipe, others)}) == len(others) + 1


def test_a_pipe_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        assert "a file is needed" in problems(place)


def test_a_file_of_ones_own_has_any_name_and_is_looked_for_when_it_is_read(write, tmp_path):
    (tmp_path / "mine.npz").touch()
    own = write(f"data: {{name: mine, root: '{tmp_path}'}}\n")
    assert "data.name = 'mine': not known" in problems(own)  # also beside a file of that name
    for more in ("data.source=file", "data.path=missing.mtx"):
        assert load_config(own, [more]).data.name == "mine"


def test_a_configuration_is_read_without_torch_and_the_kernels():
    code = "import sys; from configs import load_config; load_config('configs/infer/cora.yaml'); "
    code += "sys.exit(', '.join({'torch', 'dgl', 'fused3s', 'baselines'} & {*sys.modules}) or 0)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(path=st.sampled_from([*INFER.glob("*.yaml")]), choice=st.randoms(), value=VALUES)
def test_any_value_loads_or_is_an_error_that_names_its_key(tmp_path, path, choice, value):
    section = choice.choice([*Config.model_fields])
    key = choice.choice([*Config.model_fields[section].annotation.model_fields])
    shipped = yaml.safe_load(path.read_text())
    (tmp_path / "my.yaml").write_text(json.dumps(shipped | {section: (shipped.get(section) or {}) | {key: value}}))
    try:
        config = load_config(tmp_path / "my.yaml")
    except ConfigError as error:
        assert f"{section}.{key}" in str(error) or "YAML" in str(error)  # noqa: PT017
    else:
        number = getattr(getattr(config, section), key)
        assert not isinstance(number, float) or math.isfinite(number)
