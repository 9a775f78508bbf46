"""Command lines of the benchmarks that are wrong, and their help."""

import pytest
import torch
from scripts_as_modules import load_script
from typer.testing import CliRunner

BENCHES = ("bench_kernels", "bench_end_to_end", "bench_training", "bench_plans", "preprocessing", "sm_active_time")
MEASURING = (*BENCHES, "bench_layers", "peak_rates", "stability")


def call(script: str, *arguments: str):
    return CliRunner().invoke(load_script(script).app, arguments)


@pytest.mark.parametrize("script", MEASURING)
def test_a_flag_is_shown_without_a_value(script):
    done = call(script, "--help")
    assert done.exit_code == 0
    assert "--again" in done.stdout
    assert "<bool>" not in "".join(line for line in done.stdout.splitlines() if "--help" not in line)


@pytest.mark.parametrize("script", BENCHES)
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--config", "nowhere.yaml"), ["nowhere.yaml: no such file"]),
        (("--config", "configs"), ["configs: not valid YAML"]),
        (("--config", "configs/infer/cora.yaml"), ["no such key", "data.name"]),
        (("--config", "README.md"), ["README.md", "not valid YAML"]),
        (("--config", "{own}", "--set", "data.names"), ["--set data.names: the form is section.key=value"]),
        (("--config", "{own}", "--set", "data.names=[coar]"), ["did you mean 'cora'"]),
        (("--config", "{own}", "--set", "dta.names=[cora]"), ["did you mean 'data'"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_wrong_configuration_is_named_before_a_gpu_is_asked_for(script, arguments, parts):
    folder = {
        "bench_end_to_end": "end_to_end/single",
        "bench_training": "training_bench/single",
        "bench_plans": "plan_bench/graphs",
    }
    own = f"configs/{folder.get(script, 'bench/single')}.yaml"
    done = call(script, *(part.format(own=own) for part in arguments))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    for part in parts:
        assert part in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", [name for name in MEASURING if name not in ("preprocessing", "stability")])
def test_without_a_gpu_there_is_a_next_step(script, tmp_path):
    folder = {
        "bench_kernels": "bench/smoke",
        "bench_end_to_end": "end_to_end/single",
        "bench_training": "training_bench/single",
        "bench_plans": "plan_bench/graphs",
        "bench_layers": "bench/layers",
    }
    config = ["--config", f"configs/{folder[script]}.yaml"] if script in folder else []
    done = call(script, *config, "--results", str(tmp_path / "r.csv"))
    assert done.exit_code == 2
    assert "an NVIDIA GPU, and none was found; without one, make reproduce-figures draws" in done.stderr
    assert not (tmp_path / "r.csv").exists()


def test_graphs_over_a_limit_below_zero_are_refused():
    done = call("preprocessing", "--config", "configs/bench/smoke.yaml", "--cpu-edges", "-1")
    assert done.exit_code == 2
    assert "cpu-edges" in done.output
