"""Count what a reader of this repository meets: modules behind a command, folders and lines.

    python scripts/structure.py

Each command runs as a whole on Cora, on the CPU: a module that is imported on use counts too.
"""

import json
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "infer": ("configs/infer/cora.yaml", ("runtime.device=cpu", "runtime.warmup=1", "runtime.repeats=1")),
    "train": ("configs/train/cora.yaml", ("runtime.device=cpu", "training.epochs=2", "training.seeds=[0]")),
}
NO_ROOM = {"docs", "examples", "tests"}  # folders of Python files that no script imports
RUN_BY_NAME = ("__main__", "__mp_main__")  # the script itself
COUNTED_LINES = ("bench", "report", "configs", "scripts", "common")


def arguments(command: str, folder: str) -> list[str]:
    """The command line of a run whose files go into `folder`."""
    config, overrides = COMMANDS[command]
    changed = [part for one in overrides for part in ("--set", one)]
    output = ["--output", f"{folder}/run"] if command == "train" else []
    return [f"scripts/{command}.py", "--config", config, "--results", f"{folder}/rows.csv", *changed, *output]


def run_and_report(line: list[str]) -> None:
    """Run a script in this process, and print the names of its modules as the last line."""
    sys.argv, sys.path[0] = line, str(ROOT / "scripts")
    try:
        runpy.run_path(line[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    print(
        json.dumps(
            sorted(name for name, file in files.items() if file and is_own(Path(file)) and name not in RUN_BY_NAME)
        )
    )


def is_own(file: Path) -> bool:
    return file.suffix == ".py" and file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / ".venv")


def loaded_by(command: str) -> list[str]:
    """Modules of ours that a run of a command has loaded."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, __file__, "--run", *arguments(command, folder)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def tracked() -> list[Path]:
    """Python and YAML files in git, relative to the repository."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.yaml"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def code_folders() -> list[str]:
    """Folders at the top that a script imports from."""
    return sorted({file.parts[0] for file in tracked() if len(file.parts) > 1 and file.suffix == ".py"} - NO_ROOM)


def lines(folders: tuple[str, ...]) -> int:
    files = [file for file in tracked() if file.parts[0] in folders]
    return sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> None:
    for command in COMMANDS:
        found = loaded_by(command)
        shown = ", ".join(f"{room} {count}" for room, count in Counter(name.split(".")[0] for name in found).items())
        print(f"scripts/{command}.py: {len(found)} modules ({shown})")
    print(f"{len(code_folders())} code folders: {', '.join(code_folders())}")
    print(f"{lines(COUNTED_LINES):,} lines of {', '.join(COUNTED_LINES)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_and_report(sys.argv[2:])
    else:
        main()
