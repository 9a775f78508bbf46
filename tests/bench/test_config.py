"""Configurations of benchmarks: all files are valid, and what is wrong is named with what is allowed."""

import pytest
from bench_runs import CONFIGS

from bench.measures import MEASURES
from configs import ConfigError, load_config
from configs.bench import KEYS, BenchConfig

FILES = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_a_configuration_with_cases(path):
    import torch

    config = load_config(path, schema=BenchConfig)
    assert MEASURES[config.measure].cases(config, torch.device("cpu"))


def test_every_benchmark_has_a_file_and_reads_keys():
    assert {load_config(path, schema=BenchConfig).measure for path in FILES} == {*KEYS} == {*MEASURES}


def test_an_override_of_one_way_to_run_leaves_the_others():
    before = load_config(CONFIGS / "end_to_end.yaml", schema=BenchConfig)
    config = load_config(CONFIGS / "end_to_end.yaml", ["modes.pyg=[plain]", "repeats=3"], schema=BenchConfig)
    assert config.modes == before.modes | {"pyg": ("plain",)}
    assert (before.repeats, config.repeats) == (10, 3)
    assert config.settings_sha != before.settings_sha


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("graphs=[coraa]", "graphs = 'coraa': not known; did you mean 'cora'"),
        ("repeat=3", "repeat: no such key; did you mean 'repeats'"),
        ("modes.pyg=[plain]", "modes: no such key"),
        ("measure=kernel", "measure = 'kernel': not known; did you mean 'kernels'"),
        ("shapes=[8by3]", "shapes: got '8by3'; heads x head dimension is needed, such as 8x16"),
        ("shapes=[1x512]", "up to 256 columns"),
        ("shapes=[8x16/2]", "'8x16/2'; fewer KV heads are for measure = heads"),
        ("shapes=[8x16/3]", "'8x16/3'; KV heads must be a divisor of the heads, and fewer"),
        ("shapes=[8x16/8]", "'8x16/8'; KV heads must be"),
        ("backends=[fused3]", "did you mean 'fused3s'"),
        ("plans=[fixed, fixed]", "an entry is given twice"),
        ("repeats=0", "repeats = 0: should be greater than or equal to 1"),
        ("repeats=ten", "repeats = 'ten': should be a valid integer"),
        ("repeats", "or key=value for a benchmark"),
        ("shapes=[", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_named(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / "single.yaml", [override], schema=BenchConfig)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("measure: kernels\ngraphs: [cora]\n", "backends is missing"),
        (
            "measure: edges\ngraphs: [cora]\nbackends: [pyg]\nshapes: [1x8]\nedges: [types_900]\n",
            "types_1 to types_256",
        ),
        ("measure: sm_active\ngraphs: [cora]\nbackends: [pyg]\n", "allowed are F3S_splitR"),
        ("measure: layers\nworkloads: {a: {graph: cora, seeds: 3}}\n", "workloads.a: got seeds = 3 and fan_out = []"),
        ("measure: stability\nroot: a\nroot: b\n", "root is given twice"),
        ("measure: stability\n1: a\n", "1 is a key that is no text"),
        ("measure: layers\nworkloads: {a: {graph: zinc, batch: 9}}\nbatch_size: 5\n", "only batch_size = 5"),
        ("measure: end_to_end\ngraphs: [cora]\nmodes: {pyg+float16: [plain]}\n", "modes = 'pyg+float16'"),
        ("measure: parallel\ngraphs: [cora]\nprecisions: [tf32]\n", "precisions = 'tf32'"),
        (
            "measure: layers\nworkloads: {a: {graph: cora}}\nprecisions: [float16]\n",
            "allowed are bfloat16, float32, tf32",
        ),
        ("measure: parallel\ngraphs: [cora]\nedges: [bias]\n", "edges: no such key"),
        ("[1, 2]", "holds no keys"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, schema=BenchConfig)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_names_its_neighbours():
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such file; .*ablation\.yaml"):
        load_config(CONFIGS / "nothing.yaml", schema=BenchConfig)
