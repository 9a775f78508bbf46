"""Files and --set values that are no configuration: a line names the place, what was read and what is allowed."""

from pathlib import Path

import pytest

from configs import Config, ConfigError, load_config
from configs.bench_schema import BenchConfig
from configs.end_to_end_schema import EndToEndConfig
from configs.plan_bench_schema import PlanBenchConfig
from configs.training_bench_schema import TrainingBenchConfig

ROOT = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def problems(tmp_path):
    def problems(content: str | bytes, schema: type = Config) -> str:
        path = tmp_path / "my.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ConfigError) as caught:
            load_config(path, schema=schema)
        assert str(path) in str(caught.value)
        return str(caught.value)

    return problems


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("data: &a {name: cora}\nmodel: *a", ["line 2", "*a is an alias; write the value out"]),
        ("data: {name: !!binary aGk=}", ["binary is a tag", "line 1"]),
        ("data: {name: !!python/object/apply:os.system [ls]}", ["is a tag"]),
        ("data: {name: cora}\nmodel: {dim: !!int x}", ["is a tag", "line 2"]),
        ("data: {name: cora}\nmodel: {dim: 64, dim: 128}", ["line 2: dim was already given in line 2"]),
        ("data: {name: cora}\ndata: {name: pubmed}", ["line 2: data was already given in line 1"]),
        ("data: {name: cora}\n? [a, b]\n: 1", ["a key must be a word", "line 2"]),
        ("data: {name: cora}\n<<: {model: {dim: 64}}", ["<<", "no such key"]),
        ("data: {name: 2024-13-45}", ["data.name = '2024-13-45'", "not known"]),
        ("data: {name: cora}\nruntime: {seed: 1:30}", ["runtime.seed = '1:30'", "valid integer"]),
        ("data: {name: cora}\nruntime: {seed: 010}", ["runtime.seed = '010'", "valid integer"]),
        ("data: {name: cora}\nruntime: {seed: 0x10}", ["runtime.seed = '0x10'", "valid integer"]),
        (f"data: {{name: cora}}\nmodel: {{dim: 1{'0' * 5000}}}", ["model.dim = '1000", " ..."]),
        ("data: {name: cora}\nmodel: {dropout: .nan}", ["model.dropout = nan"]),
        ("data: {name: cora}\ntraining: {lr: .inf}", ["training.lr = inf", "finite"]),
        ("data: {name: cora}\n1: 2", ["1 = 1: no such key", "data, model"]),
        ("data: {name: cora}\nmodel: [1, 2]", ["model = [1, 2]: a section is needed", "dim, heads"]),
        ("data: {name: cora}\nmodel: {dim: {a: 1}}", ["model.dim = {'a': 1}", "valid integer"]),
        ("[data, model]", ["holds a list; sections are needed: data, model"]),
        ("3", ["holds a int; sections are needed"]),
        ("a: [" * 3000, ["nested too deeply"]),
        ("data: {name: cora", ["not valid YAML", "line 1"]),
        ("data: {name: cora}\n---\ndata: {name: pubmed}", ["not valid YAML", "single document"]),
        (b"data: {name: \x07}", ["not valid YAML", "special characters are not allowed"]),
        (b"\xff\xfe\x00d", ["cannot be read as text"]),
        (b"\x89PNG\r\n\x1a\n", ["cannot be read as text"]),
        (b"#" * 1_000_001, ["more than 1,000,000 bytes"]),
        ("", ["data is missing"]),
    ],
    ids=lambda value: None if isinstance(value, list) else repr(value[:24]),
)
def test_what_is_no_configuration_is_said(problems, content, parts):
    text = problems(content)
    assert len(text) < 10_000
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("schema", "file", "override", "parts"),
    [
        (BenchConfig, "bench/single", "data.names=[coar]", ["'coar' is not known, did you mean 'cora'?"]),
        (BenchConfig, "bench/single", "data.names=[cora, cora]", ["data.names", "'cora' is given twice"]),
        (BenchConfig, "bench/single", "data.names=[../../etc/x]", ["data.names = '../../etc/x'", "without /"]),
        (BenchConfig, "bench/single", f"data.names=[{'x' * 300}]", ["data.names", "1 to 200 bytes"]),
        (BenchConfig, "bench/single", "data.names=cora", ["data.names = 'cora'", "valid tuple"]),
        (BenchConfig, "bench/single", "data.names=[]", ["data.names", "at least 1 item"]),
        (BenchConfig, "bench/single", f"data.names={['cora'] * 1001}", ["data.names", "at most 1000 items"]),
        (BenchConfig, "bench/single", 'data.root="a\\0b"', ["data.root", "null byte"]),
        (BenchConfig, "bench/single", f"data.root={'x' * 300}", ["data.root", "File name too long"]),
        (BenchConfig, "bench/single", "data.batch_size=1e9", ["data.batch_size = 1000000000.0", "valid integer"]),
        (BenchConfig, "bench/single", "data.batch_size=10000000000", ["data.batch_size", "less than or equal"]),
        (BenchConfig, "bench/single", "data.batch_size=true", ["data.batch_size = True", "valid integer"]),
        (BenchConfig, "bench/single", "kernel.dims=[64, 64]", ["kernel.dims", "64 is given twice"]),
        (BenchConfig, "bench/single", "kernel.dims=[257]", ["kernel.dims", "got 257; 1 to 256"]),
        (BenchConfig, "bench/single", "kernel.dims=[true]", ["kernel.dims.0 = True", "valid integer"]),
        (BenchConfig, "bench/heads", "kernel.shapes=[99999x8]", ["kernel.shapes", "'99999x8'", "up to 65535 heads"]),
        (BenchConfig, "bench/heads", "kernel.shapes=[1x999999999999]", ["kernel.shapes", "such as 8x16"]),
        (BenchConfig, "bench/heads", "kernel.shapes=[8x16, 8x16]", ["kernel.shapes", "'8x16' is given twice"]),
        (BenchConfig, "bench/single", "kernel.backends=[fused3]", ["did you mean 'fused3s'"]),
        (BenchConfig, "bench/single", "kernel.backend=fused3s", ["no such key", "did you mean 'backends'"]),
        (BenchConfig, "bench/single", "kernels.dims=[64]", ["kernels", "no such key", "did you mean 'kernel'"]),
        (BenchConfig, "bench/edges", "kernel.edges=[low_rank_99999999]", ["kernel.edges", "low_rank_1 to low_rank_16"]),
        (BenchConfig, "bench/single", "measure.scale=.nan", ["measure.scale", "finite"]),
        (BenchConfig, "bench/single", "measure.scale=1e300", ["measure.scale", "less than or equal"]),
        (BenchConfig, "bench/single", "measure.repeats=1000000000", ["measure.repeats", "less than or equal"]),
        (EndToEndConfig, "end_to_end/single", "measure.budget_ms=.inf", ["measure.budget_ms = inf", "finite"]),
        (EndToEndConfig, "end_to_end/single", "measure.budget_ms=.nan", ["measure.budget_ms = nan"]),
        (EndToEndConfig, "end_to_end/single", "measure.seed=-1", ["measure.seed = -1", "greater than or equal to 0"]),
        (
            EndToEndConfig,
            "end_to_end/single",
            "model.dims=[64, 3]",
            ["model.dims", "width 3", "model.dim", "equal to 4"],
        ),
        (EndToEndConfig, "end_to_end/single", "model.heads=1000000000", ["model.heads", "less than or equal"]),
        (EndToEndConfig, "end_to_end/single", "model.heads=7", ["width 64, 7 heads", "multiple of heads"]),
        (EndToEndConfig, "end_to_end/single", "run.modes={fused3s: [plain, plain]}", ["run.modes.fused3s", "twice"]),
        (EndToEndConfig, "end_to_end/single", "run.modes={fused3s: [plane]}", ["'plane'", "did you mean 'plain'"]),
        (EndToEndConfig, "end_to_end/single", "run.modes={fused: [plain]}", ["run.modes", "did you mean 'fused3s'"]),
        (EndToEndConfig, "end_to_end/single", "run.modes={dgl: [plain], dgl: [fused]}", ["dgl was already given"]),
        (EndToEndConfig, "end_to_end/single", "run.modes={}", ["run.modes = {}", "at least 1 item"]),
        (EndToEndConfig, "end_to_end/single", "run.regions=[dgl, dgl]", ["run.regions", "'dgl' is given twice"]),
        (TrainingBenchConfig, "training_bench/single", "model.heads=[3]", ["model.heads", "multiple of heads"]),
        (TrainingBenchConfig, "training_bench/single", "model.heads=[1, 1]", ["model.heads", "1 is given twice"]),
        (TrainingBenchConfig, "training_bench/single", "model.dim=100000000000", ["model.dim", "less than or equal"]),
        (
            TrainingBenchConfig,
            "training_bench/single",
            "model.blocks=1000000000",
            ["model.blocks", "less than or equal"],
        ),
        (PlanBenchConfig, "plan_bench/graphs", "measure.seconds=.inf", ["measure.seconds = inf", "finite"]),
        (PlanBenchConfig, "plan_bench/graphs", "measure.seconds=true", ["measure.seconds = True", "valid number"]),
        (PlanBenchConfig, "plan_bench/graphs", "plan.shapes=[8x16, 8x16]", ["plan.shapes", "'8x16' is given twice"]),
        (PlanBenchConfig, "plan_bench/graphs", "plan.backend=fusd3s", ["plan.backend", "did you mean 'fused3s'"]),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_a_value_of_a_benchmark_that_is_wrong_is_named(schema, file, override, parts):
    with pytest.raises(ConfigError) as caught:
        load_config(ROOT / f"{file}.yaml", [override], schema)
    text = str(caught.value)
    assert f"--set {override[:30]}" in text
    for part in parts:
        assert part in text, text


def test_a_list_of_problems_ends(problems):
    text = problems("data: {name: cora}\n" + "".join(f"key{n}: 1\n" for n in range(500)))
    assert "500 problems" in text
    assert text.count("no such key") == 100


def test_what_yaml_11_calls_false_is_still_false(tmp_path):
    (tmp_path / "my.yaml").write_text(
        "data: {name: cora}\nruntime: {cuda_graph: off, seed: 1_000}\ntraining: {lr: 1.5E-3}"
    )
    config = load_config(tmp_path / "my.yaml")
    assert (config.runtime.cuda_graph, config.runtime.seed, config.training.lr) == (False, 1000, 0.0015)
