"""The address of the repository, which CONTRIBUTING.md has one command to set."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FILES = ("README.md", "CITATION.cff", "CONTRIBUTING.md", "pyproject.toml", "mkdocs.yml")


def test_one_command_sets_the_address_everywhere(tmp_path):
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    (command,) = re.findall(r"^\$ (sed .*)$", (tmp_path / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)
    for step in ("git init -q", "git add .", command):
        subprocess.run(step, cwd=tmp_path, shell=True, check=True)
    address = "https://github.com/you/your-repository"
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation, site = (yaml.safe_load((tmp_path / name).read_text("utf-8")) for name in ("CITATION.cff", "mkdocs.yml"))
    assert [project["urls"]["Repository"], citation["repository-code"], site["repo_url"]] == [address] * 3
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"git+{address}" in readme
    assert "OWNER" not in readme
