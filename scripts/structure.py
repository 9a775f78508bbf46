"""Count what a reader of this repository meets: modules behind a command, record types, folders and lines.

    python scripts/structure.py

Each command runs as a whole on Cora, on the CPU: a module that is imported on use counts too. Start-up is the processor
time of `--help`, the shortest of five.
"""

import dataclasses
import json
import resource
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

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


def run_and_report(line: list[str], records: bool) -> None:
    """Run a script in this process, and print the names of its modules and record types as the last line."""
    made: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        """Records are made by generated methods, which have no file."""
        code = frame.f_code
        if event == "call" and code.co_filename == "<string>" and code.co_name in ("__init__", "__new__"):
            first = next(iter(frame.f_locals.values()), None)
            kind = first if isinstance(first, type) else type(first)
            if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
                made.add(f"{kind.__module__}.{kind.__qualname__}")

    sys.argv, sys.path[0] = line, str(ROOT / "scripts")
    if records:
        sys.setprofile(note)
    try:
        runpy.run_path(line[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    own = sorted(name for name, file in files.items() if file and is_own(Path(file)) and name not in RUN_BY_NAME)
    rooms = {name.split(".")[0] for name in own}
    print(json.dumps({"modules": own, "records": sorted(one for one in made if one.split(".")[0] in rooms)}))


def is_own(file: Path) -> bool:
    return file.suffix == ".py" and file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / ".venv")


def loaded_by(command: str, *, records: bool = False) -> dict[str, list[str]]:
    """Modules of ours that a run of a command has loaded, and with `records` the record types that it made."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, __file__, "--records" if records else "--run", *arguments(command, folder)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def start_up_seconds(command: str) -> float:
    """Processor time until a command has read its options."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, f"scripts/{command}.py", "--help"], cwd=ROOT, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(5))


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
        found, seconds = loaded_by(command, records=True), start_up_seconds(command)
        rooms = Counter(name.split(".")[0] for name in found["modules"])
        shown = ", ".join(f"{room} {count}" for room, count in rooms.items())
        print(f"scripts/{command}.py: {len(found['modules'])} modules ({shown}); {seconds:.2f} s to start")
        print(f"  {len(found['records'])} record types: {', '.join(found['records'])}")
    print(f"{len(code_folders())} code folders: {', '.join(code_folders())}")
    print(f"{lines(COUNTED_LINES):,} lines of {', '.join(COUNTED_LINES)}")


if __name__ == "__main__":
    if sys.argv[1:2] in (["--run"], ["--records"]):
        run_and_report(sys.argv[2:], sys.argv[1] == "--records")
    else:
        main()
