"""The Python lines of the README run on a machine without a GPU, or end with the error that stands here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# The start of the error, and whether the backend `reference`, which the README or the error names, runs the line.
REFUSED = {
    "out, lse = plan(q, k, v, return_lse=True)": (
        "ValueError: return_lse: backend csr_unfused has no log-sum-exp; these have: fused3s, reference",
        True,
    ),
    "plan.to('cuda:1')": ("BackendUnavailableError: device: got 'cuda:1', and no NVIDIA GPU", False),
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("reader")
    command = [sys.executable, str(ROOT / "tests" / "support" / "readme_lines.py"), str(ROOT / "README.md")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.rindex('[{"source"') :])  # lines of the README print, too


def test_every_line_runs_but_those_whose_error_says_what_to_do(lines):
    failed = {line["source"]: (line["error"], line["again"] is None) for line in lines if line["error"]}
    assert failed.keys() == REFUSED.keys()
    for source, (start, runs_with_reference) in REFUSED.items():
        error, again = failed[source]
        assert error.startswith(start)
        assert again == runs_with_reference


def test_all_blocks_are_run(lines):
    sources = "\n".join(line["source"] for line in lines)
    for expected in (
        "reorder='auto'",
        "bind_edges",
        "FusedTransformerConv(",
        "SparseMHA(",
        "AGNNLayer(",
        ".backward()",
    ):
        assert expected in sources
