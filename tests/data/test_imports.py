"""Imports of `data`, read from the source: also those inside functions and under TYPE_CHECKING."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import data

ROOT = Path(data.__file__).parent


def imports(file: Path) -> set[str]:
    """Names of the modules that a file imports anywhere, and `module.name` for each imported name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules() -> dict[str, set[str]]:
    """Each module of `data`, packages included, with its imports."""
    names = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = imports(file)
    return names


def test_data_imports_nothing_that_uses_it():
    users = {"kernels", "models", "bench", "report", "configs", "scripts"}
    for name, imported in modules().items():
        assert not {other.split(".")[0] for other in imported} & users, name


def test_modules_form_no_circle():
    own = modules()
    graph = {name: {other for other in imported if other in own} for name, imported in own.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError
    assert graph["data.registry.entry"] >= {"data.spec"}
