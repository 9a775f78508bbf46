"""Count what a reader of this repository meets: modules of ours behind a command, and code folders.

    python scripts/structure.py

Each command runs as a whole on Cora, on the CPU: a module that is imported on use counts too.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "infer": "--config configs/infer/cora.yaml --set runtime.repeats=1",
    "train": "--config configs/train/cora.yaml --set training.epochs=2 --set training.seeds=[0] --output run",
}
NO_ROOM = {"docs", "examples", "tests"}  # folders of Python files that no script imports
RUN = """
import json, runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
print(json.dumps({name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}))
"""


def loaded_by(command: str) -> list[str]:
    """Modules of ours that a run of a command has loaded."""
    with tempfile.TemporaryDirectory() as folder:
        words = COMMANDS[command].replace("--output ", f"--output {folder}/").split()
        line = [f"scripts/{command}.py", *words, "--set", "runtime.device=cpu", "--results", f"{folder}/rows.csv"]
        done = subprocess.run([sys.executable, "-c", RUN, *line], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)}: {done.stderr}")
    files = json.loads(done.stdout.splitlines()[-1])
    own = {name: Path(file) for name, file in files.items() if file and file.endswith(".py")}
    return sorted(
        name
        for name, file in own.items()
        if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / ".venv") and name != "__main__"
    )


def code_folders() -> list[str]:
    """Folders at the top that a script imports from."""
    listed = subprocess.run(["git", "ls-files", "*/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted({line.partition("/")[0] for line in listed.stdout.splitlines()} - NO_ROOM)


def main() -> None:
    for command in COMMANDS:
        found = loaded_by(command)
        shown = ", ".join(f"{room} {count}" for room, count in Counter(name.split(".")[0] for name in found).items())
        print(f"scripts/{command}.py: {len(found)} modules ({shown})")
    print(f"{len(code_folders())} code folders: {', '.join(code_folders())}")


if __name__ == "__main__":
    main()
