"""Imports between the folders, read from the source: also those inside functions and under TYPE_CHECKING."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Which folders a folder may import; itself always. scripts/ may import all of them, tests aside.
ALLOWED = {
    "kernels": {"fused3s_dgl"},
    "baselines": {"kernels", "fused3s_dgl"},
    "dense": {"kernels"},
    "data": {"fused3s_dgl"},
    "models": {"kernels", "dense", "fused3s_dgl"},
    "configs": {"kernels", "baselines", "dense", "data"},
    "training": {"kernels", "data", "models", "configs"},
    "parallel": {"kernels", "data", "models", "configs", "training"},
    "bench": {"kernels", "baselines", "dense", "data", "models", "configs", "training", "parallel", "fused3s_dgl"},
    "inference": {"kernels", "data", "models", "configs", "training", "parallel", "bench"},
    "report": {"bench", "configs"},
}


def imports(file: Path, package: list[str]) -> set[str]:
    """Modules that a file imports anywhere, absolute, and `module.name` for each imported name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def modules(folder: str) -> dict[str, set[str]]:
    """Each module of a folder, packages included, with its imports."""
    found = {}
    for file in (ROOT / folder).rglob("*.py"):
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        package = parts[:-1]
        name = package if parts[-1] == "__init__" else parts
        found[".".join(name)] = imports(file, package)
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_folders_import_only_what_lies_below_them(folder):
    own_names = {*ALLOWED, "scripts", "tests", "fused3s_dgl"}
    for name, imported in modules(folder).items():
        used = {other.split(".")[0] for other in imported} & own_names
        assert used <= ALLOWED[folder] | {folder}, name


def test_modules_form_no_circle():
    own = {name: imported for folder in ALLOWED for name, imported in modules(folder).items()}
    graph = {
        # A package that lists its modules is no circle: `from package import module` inside it needs that module alone.
        name: {other for other in imported if other in own and not f"{name}.".startswith(f"{other}.")}
        for name, imported in own.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError
    assert "data.graph" in graph["data.registry"]
    assert "kernels.backends.base" in graph["kernels.plan"]


def test_kernels_import_relatively():
    """The folder is also installed as the package fused3s."""
    for file in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kernels"), file
