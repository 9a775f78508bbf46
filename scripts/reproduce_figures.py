"""Measure on the GPU, then draw; without a GPU, draw the recorded CSVs. `make reproduce-figures`.

    python scripts/reproduce_figures.py [STEP ...] [--source auto]

STEP is one or more steps of configs/suite.yaml: "paper" for what the paper shows, "all" for more, "none" to measure
nothing. It says first what is downloaded, and how much time, disk and memory it takes. With --source auto a synthetic
surrogate takes the place of a benchmark's graph that cannot be had; training needs the official labels.
Measurements go to results/local and figures to results/local/figures: nothing recorded is overwritten. An interrupted
step resumes.

At the end everything is drawn, and graphs that could not be fetched are listed; they do not count as a failure. Exit
status: 0, or that of the first step that failed; the other steps still run. Without any measurement it is not 0.
"""

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise, product
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import pandas as pd
import torch
import typer
from rich.text import Text

import data
from common.cli import NOT_LOADED, console, user_errors
from common.provenance import provenance
from configs import Config, TrainConfig, load_config
from configs.bench import BenchConfig
from configs.load import read_yaml
from configs.schema import did_you_mean
from configs.suite import PAPER, STEPS

ROOT = Path(__file__).resolve().parent.parent
RECORDED, MEASURED, DATASETS = Path("results"), Path("results", "local"), ROOT / "datasets"
GROUPS = {"paper": PAPER, "all": [name for name, step in STEPS.items() if "in" in step], "none": []}
DURATIONS = "durations.csv"  # below RECORDED and MEASURED: seconds of steps by GPU

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    steps: Annotated[list[str] | None, typer.Argument(metavar="STEP", help=", ".join([*GROUPS, *STEPS]))] = None,
    source: Annotated[
        Literal["official", "auto", "file", "synthetic"] | None,
        typer.Option(help="Where benchmarks take graphs from, unless the configuration says it: official by default."),
    ] = None,
) -> None:
    """Measure if there is a GPU, and draw."""
    chosen = chosen_steps(steps or ["paper"])
    if chosen and not torch.cuda.is_available():
        console.print(Text("no NVIDIA GPU found: nothing is measured"))
        chosen = []
    console.print(Text(estimate(chosen, source) if chosen else f"drawing from the CSVs recorded in {RECORDED}"))
    failed: dict[str, int] = {}
    missing: dict[str, None] = {}
    # Configurations of train.py and infer.py without their data set: neither asked for again, nor are there weights.
    not_loaded: set[Path] = set()
    with user_errors(kept=lambda: f"what was measured is in {MEASURED}; the same command continues"):
        for name in chosen:
            start, statuses = time.monotonic(), []
            for command in commands(STEPS[name], source):
                config = config_of(command)
                status, problems = (NOT_LOADED, []) if config in not_loaded else run(command)
                statuses.append(status)
                if status == NOT_LOADED:
                    missing |= dict.fromkeys(problems)
                    if command[0] != "bench.py":  # it has measured its other graphs
                        not_loaded.add(config)
                elif status:
                    failed.setdefault(name, status)
            if not any(statuses):
                record_duration(name, time.monotonic() - start)
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
        allowed = [*GROUPS, *STEPS]
        hints = "".join(did_you_mean(name, allowed) for name in unknown)
        text = f"unknown: {', '.join(unknown)};{hints} allowed are {', '.join(allowed)}"
        raise typer.BadParameter(text, param_hint="FIGURES")
    wanted = {step for name in names for step in GROUPS.get(name, [name])}
    return [name for name in STEPS if name in wanted]


def estimate(names: list[str], source: str | None) -> str:
    """Time, downloads, disk and memory of some steps. Steps share graphs, so that the largest disk and memory count."""
    gpu = torch.cuda.get_device_properties(0)
    durations = {name: duration(name, gpu.name) for name in names}
    lines = [
        f"  {name:<22} {ceil(seconds / 60):>4} min  {f'measured on {device}' if device else 'an estimate'}"
        for name, (seconds, device) in durations.items()
    ]
    graphs, to_fetch = set_names(names, source)
    costs = pd.read_csv(ROOT / RECORDED / "datasets" / "costs.csv")
    peaks = costs.loc[costs["dataset"].isin(graphs), "peak_memory_mib"] / 1024
    host = max([0, *peaks, *(STEPS[name].get("host_gb", 0) for name in names)])
    disk = max(STEPS[name].get("gb", 0) for name in names)
    free = shutil.disk_usage(DATASETS if DATASETS.exists() else ROOT).free / 1e9
    facts = {
        "downloads": ", ".join(to_fetch) or "nothing",
        "disk": f"up to {disk} GB for downloads; {free:.0f} GB are free (graphs that do not fit are left out)",
        "memory": f"{host:.1f} GB of the host; " * (host > 0)
        + f"what does not fit the GPU's {gpu.total_memory / 1e9:.0f} GB is marked",
    }
    minutes = ceil(sum(seconds for seconds, _ in durations.values()) / 60)
    head = f"about {minutes // 60} h {minutes % 60:02d} min, downloads not counted:"
    return "\n".join([head, *lines, *(f"{name:<10} {text}" for name, text in facts.items())])


def duration(name: str, gpu: str) -> tuple[float, str]:
    """Seconds of a step, and the GPU they are of: the longest on this one, or some on another; "" for an estimate."""
    files = [path for path in (ROOT / RECORDED / DURATIONS, ROOT / MEASURED / DURATIONS) if path.exists()]
    table = pd.concat([pd.read_csv(path) for path in files], ignore_index=True)
    table = table[table["step"] == name]
    here = table[table["device"] == gpu]
    found = here.nlargest(1, "seconds") if len(here) else table.head(1)
    return (found["seconds"].item(), found["device"].item()) if len(found) else (60.0 * STEPS[name]["minutes"], "")


def record_duration(name: str, seconds: float) -> None:
    """Keep how long a step took here. A resumed step takes less: `duration` reads the longest."""
    path = ROOT / MEASURED / DURATIONS
    path.parent.mkdir(parents=True, exist_ok=True)
    here = provenance(torch.device("cuda"))
    line = pd.DataFrame([{"step": name, "seconds": round(seconds), "commit": here["commit"], "device": here["device"]}])
    line.to_csv(path, mode="a", header=not path.exists(), index=False)


def set_names(steps: list[str], source: str | None) -> tuple[set[str], list[str]]:
    """Data sets that the benchmarks of some steps read, and those that all their scripts fetch first."""
    graphs, official = set(), set()
    for command in (command for name in steps for command in commands(STEPS[name], source)):
        overrides = [value for option, value in pairwise(command) if option == "--set"]
        if command[0] == "bench.py":
            config = load_config(config_of(command), overrides, schema=BenchConfig)
            graphs |= {config.graph_of(name) for name in config.names}
            if config.source in ("official", "auto"):
                official |= {config.graph_of(name) for name in config.names}
        else:
            schema = TrainConfig if command[0] == "train.py" else Config
            official.add(load_config(config_of(command), overrides, schema).data.name)
    entries = {name: data.info(name) for name in data.names() if name in official}
    absent = [name for name, one in entries.items() if one.embedded is None and not one.official.is_present(DATASETS)]
    return graphs, absent


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
                config = read_yaml(config_of(command))
                if source and "source" not in config and "source=" not in line:
                    command += ["--set", f"source={source}"]
                command += ["--results", str(MEASURED)]
            elif "configs/train/" in line:  # for scores: a surrogate has no labels
                command += ["--set", "data.source=official"]
            yield command


def config_of(command: list[str]) -> Path:
    """Configuration of a script."""
    return ROOT / command[command.index("--config") + 1]


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
