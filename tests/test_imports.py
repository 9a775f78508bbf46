"""Imports between the folders, read from the source: also those inside functions and under TYPE_CHECKING; encodings."""

import ast
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"fused3s": "kernels"}  # where the name differs
# Which rooms a room may import; itself always. A subpackage with a line of its own is another room than the package
# around it. scripts/ may import all of them, tests aside.
ALLOWED = {
    "fused3s": set(),
    "data": {"fused3s"},
    "bench.baselines": {"fused3s", "data"},
    "examples": {"fused3s", "data"},
    "configs": {"data", "bench.baselines"},
    "common": {"fused3s", "data", "configs"},
    "models.dense": {"fused3s"},
    "models": {"fused3s", "data", "configs", "bench.baselines", "models.dense"},
    "models.inference": {"fused3s", "data", "configs", "common", "models"},
    "models.training": {"fused3s", "data", "configs", "common", "models"},
    "parallel": {"fused3s", "data", "configs", "common", "models", "models.inference", "models.training"},
    "bench": {
        *("fused3s", "data", "bench.baselines", "configs", "common"),
        *("models", "models.inference", "models.training", "parallel", "examples"),
    },
    "report": {"configs", "common", "bench"},
}
PACKAGES = sorted({room.split(".")[0] for room in ALLOWED})
NEVER = ("kernels", "scripts", "tests")  # kernels/ is imported as fused3s


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


def room_of(module: str) -> str | None:
    """The room that a module is in, or one of NEVER; None for a module of others."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in ALLOWED or name in NEVER), None)


def modules(package: str) -> dict[str, set[str]]:
    """Each module of a package, subpackages included, with its imports."""
    found = {}
    folder = ROOT / FOLDERS.get(package, package)
    for file in folder.rglob("*.py"):
        parts = [package, *file.relative_to(folder).with_suffix("").parts]
        name = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(name)] = imports(file, parts[:-1])
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_import_only_what_lies_below_them(room):
    own = {name: imported for name, imported in modules(room.split(".")[0]).items() if room_of(name) == room}
    assert own
    for name, imported in own.items():
        assert {room_of(other) for other in imported} - {None} <= ALLOWED[room] | {room}, name


def test_the_wheel_has_every_folder_of_the_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {file.parent.relative_to(ROOT / "kernels") for file in (ROOT / "kernels").rglob("*.py")}
    assert sorted(listed) == sorted(".".join(["fused3s", *folder.parts]) for folder in folders)


@pytest.mark.parametrize("package", [*PACKAGES, "scripts"])
def test_text_files_are_utf_8_whatever_the_locale_is(package):
    for file in (ROOT / FOLDERS.get(package, package)).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("read_text", "write_text"):
                assert "encoding" in {each.arg for each in node.keywords}, f"{file}:{node.lineno}"


def test_modules_form_no_circle():
    own = {name: imported for package in PACKAGES for name, imported in modules(package).items()}
    graph = {
        # A package that lists its modules is no circle: `from package import module` inside it needs that module alone.
        name: {other for other in imported if other in own and not f"{name}.".startswith(f"{other}.")}
        for name, imported in own.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError
    assert "data.graph" in graph["data.registry"]
    assert "fused3s.backends.base" in graph["fused3s.plan"]
