"""Measure on the GPU, then draw; without a GPU, draw the recorded CSVs. `make reproduce-figures`.

    python scripts/reproduce_figures.py [STEP ...] [--source auto]

STEP is one or more steps of configs/suite.yaml; "all" is all but those with `in_all: false`, "none" measures nothing.
Graphs are downloaded; with --source auto a synthetic surrogate takes the place of one that cannot be had. Measurements
go to results/local and figures to results/local/figures: nothing recorded is overwritten. An interrupted step resumes.

At the end everything is drawn, and graphs that could not be fetched are listed; they do not count as a failure. Exit
status: 0, or that of the first step that failed; the other steps still run.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import clone  # noqa: F401, stands first
import torch
import typer
import yaml
from rich.text import Text

from bench.cli import console, short_errors
from bench.runner import NOT_LOADED

ROOT = Path(__file__).resolve().parent.parent
RECORDED, MEASURED = Path("results"), Path("results", "local")
STEPS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "configs" / "suite.yaml").read_text(encoding="utf-8"))
GROUPS = {"all": [name for name, step in STEPS.items() if step.get("in_all", True)], "none": []}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    steps: Annotated[list[str] | None, typer.Argument(metavar="STEP", help=", ".join([*GROUPS, *STEPS]))] = None,
    source: Annotated[
        Literal["official", "auto", "file", "synthetic"] | None,
        typer.Option(help="Where graphs come from, unless the configuration says it: official by default."),
    ] = None,
) -> None:
    """Measure if there is a GPU, and draw."""
    chosen = chosen_steps(steps or ["all"])
    if chosen and not torch.cuda.is_available():
        console.print(Text("no NVIDIA GPU found: nothing is measured"))
        chosen = []
    console.print(Text(estimate(chosen) if chosen else f"drawing from the CSVs recorded in {RECORDED}"))
    failed: dict[str, int] = {}
    missing: dict[str, None] = {}
    with short_errors(kept=lambda: f"what was measured is in {MEASURED}; the same command continues"):
        for name in chosen:
            for command in commands(STEPS[name], source):
                status, problems = run(command)
                if status == NOT_LOADED:
                    missing |= dict.fromkeys(problems)
                elif status:
                    failed.setdefault(name, status)
        if status := run(["report.py", "--results", str(MEASURED if chosen else RECORDED)])[0]:
            failed["report.py"] = status
    for problem in missing:
        console.print(Text(f"left out   {problem}"))
    for name, status in failed.items():
        console.print(Text(f"failed     {name}: exit status {status}, see above"))
    raise typer.Exit(next(iter(failed.values()), 0))


def chosen_steps(names: list[str]) -> list[str]:
    """Steps of the given names, in the order in which they run."""
    if unknown := [name for name in names if name not in STEPS and name not in GROUPS]:
        allowed = ", ".join([*GROUPS, *STEPS])
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; allowed are {allowed}", param_hint="FIGURES")
    wanted = {step for name in names for step in GROUPS.get(name, [name])}
    return [name for name in STEPS if name in wanted]


def estimate(names: list[str]) -> str:
    """Time and disk of some steps. Steps share graphs, so that the largest counts."""
    lines = [f"  {name:<22} {STEPS[name]['minutes']:>4} min  {STEPS[name]['gb']:>5} GB" for name in names]
    minutes, gb = sum(STEPS[name]["minutes"] for name in names), max(STEPS[name]["gb"] for name in names)
    total = f"about {minutes // 60} h {minutes % 60:02d} min on one H200, and {gb} GB or a few more on disk, at first"
    return "\n".join([total, *lines])


def commands(step: dict[str, Any], source: str | None) -> Iterator[list[str]]:
    """Scripts of this folder with their arguments."""
    each = step.get("each", {})
    for values in product(*each.values()):
        chosen = dict(zip(each, values, strict=True))
        if any(one.items() <= chosen.items() for one in step.get("without", [])):
            continue
        for line in step["run"]:
            command = shlex.split(line.format(results=MEASURED, **chosen))
            if command[0] == "bench.py":
                config = yaml.safe_load((ROOT / command[2]).read_text(encoding="utf-8"))
                if source and "source" not in config and "source=" not in line:
                    command += ["--set", f"source={source}"]
                command += ["--results", str(MEASURED)]
            yield command


def run(command: list[str]) -> tuple[int, list[str]]:
    """Run a script of this folder from the root with this Python; its exit status and its lines of errors."""
    console.print(Text(f"running    python scripts/{shlex.join(command)}"))
    process = subprocess.Popen(
        [sys.executable, f"scripts/{command[0]}", *command[1:]], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        problems = []
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            if line.startswith("error: "):
                problems.append(line.removeprefix("error: ").strip())
        return process.wait(), problems
    except KeyboardInterrupt:  # a terminal sends it to both: the script ends its step in its own way
        process.wait()
        raise


if __name__ == "__main__":
    app()
