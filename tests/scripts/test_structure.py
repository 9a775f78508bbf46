"""What a command loads, by name: a module that it does not need is a module that a reader must rule out."""

import pytest
from scripts_as_modules import load_script

NEVER = ("bench.baselines.", "bench.runner", "parallel", "report", "models.dense")
structure = load_script("structure")


@pytest.mark.parametrize(
    ("command", "most", "unused"),
    [
        (
            "infer",
            120,
            ("bench.runner", "models.training", "parallel", "report", "models.dense", "fused3s.fused.planning"),
        ),
        ("train", 160, ("bench.runner", "parallel", "report", "models.dense", "models.inference")),
    ],
)
def test_a_run_on_cora_without_a_gpu_loads_what_it_runs(command, most, unused):
    loaded = structure.loaded_by(command)
    assert "fused3s.backends.csr_unfused" in loaded  # the count is of a whole run
    assert len(loaded) <= most
    assert not [name for name in loaded if name.startswith((*NEVER, *unused))]


def test_code_folders_at_the_top_are_few():
    assert len(structure.code_folders()) <= 9
