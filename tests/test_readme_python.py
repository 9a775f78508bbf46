"""The Python blocks of the README and of the pages in docs/ run as they stand, without a GPU."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
PAGES = (
    "README.md",
    "kernels/README.md",
    "docs/datasets.md",
    "docs/layers.md",
    "docs/threads.md",
    "docs/training.md",
    "docs/backends.md",
    "docs/add/score-term.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    blocks = FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
    assert blocks
    names: dict[str, object] = {}  # a block goes on where the one before it ended
    for block in blocks:
        exec(compile(block, page, "exec"), names)
