"""Imports between the folders, read from the source: also those inside functions and under TYPE_CHECKING; encodings."""

import ast
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"fused3s": "kernels"}  # where the name differs
# Which packages a package may import; itself always. scripts/ may import all of them, tests aside.
ALLOWED = {
    "fused3s": set(),
    "data": {"fused3s"},
    "baselines": {"fused3s", "data"},
    "dense": {"fused3s"},
    "configs": {"baselines", "data"},
    "common": {"fused3s", "data", "configs"},
    "models": {"fused3s", "baselines", "dense", "data", "configs"},
    "inference": {"fused3s", "data", "configs", "common", "models"},
    "training": {"fused3s", "data", "configs", "common", "models"},
    "parallel": {"fused3s", "data", "configs", "common", "models", "inference", "training"},
    "bench": {"fused3s", "baselines", "data", "configs", "common", "models", "inference", "training", "parallel"},
    "report": {"configs", "common", "bench"},
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


def modules(package: str) -> dict[str, set[str]]:
    """Each module of a package, subpackages included, with its imports."""
    found = {}
    folder = ROOT / FOLDERS.get(package, package)
    for file in folder.rglob("*.py"):
        parts = [package, *file.relative_to(folder).with_suffix("").parts]
        name = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(name)] = imports(file, parts[:-1])
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_lies_below_them(package):
    own_names = {*ALLOWED, "kernels", "scripts", "tests"}
    for name, imported in modules(package).items():
        used = {other.split(".")[0] for other in imported} & own_names
        assert used <= ALLOWED[package] | {package}, name


def test_the_wheel_has_every_folder_of_the_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {file.parent.relative_to(ROOT / "kernels") for file in (ROOT / "kernels").rglob("*.py")}
    assert sorted(listed) == sorted(".".join(["fused3s", *folder.parts]) for folder in folders)


@pytest.mark.parametrize("package", [*ALLOWED, "scripts", "examples"])
def test_text_files_are_utf_8_whatever_the_locale_is(package):
    for file in (ROOT / FOLDERS.get(package, package)).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("read_text", "write_text"):
                assert "encoding" in {each.arg for each in node.keywords}, f"{file}:{node.lineno}"


def test_modules_form_no_circle():
    own = {name: imported for package in ALLOWED for name, imported in modules(package).items()}
    graph = {
        # A package that lists its modules is no circle: `from package import module` inside it needs that module alone.
        name: {other for other in imported if other in own and not f"{name}.".startswith(f"{other}.")}
        for name, imported in own.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError
    assert "data.graph" in graph["data.registry"]
    assert "fused3s.backends.base" in graph["fused3s.plan"]
