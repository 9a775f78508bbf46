"""Measure on this machine's GPU, then draw; without a GPU, draw from the recorded CSVs. `make reproduce-figures`.

    python scripts/reproduce_figures.py [STEP ...]

STEP is one or more of the names below; "all" stands for all but smoke, "none" measures nothing. What is measured goes
to results/local and is drawn to results/local/figures, so that nothing recorded is overwritten; a step that was stopped
goes on where it stopped. Exit status: 0, or that of the first step that failed; the others still run, and what there is
is drawn.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import torch
import typer
from rich.text import Text

from bench.terminal import console
from report.kernel_frames import LOCAL

ROOT = Path(__file__).resolve().parent.parent
RECORDED, MEASURED = Path("results"), Path("results", LOCAL)
KERNELS = ("bench_kernels.py", "--results", f"{MEASURED}/kernels.csv", "--config")
# The kernels of "beyond the paper" with fp16 output; with fp32 output they are among KERNELS.
HALF_OUTPUT = ("--set", "kernel.out_dtype=float16", "--set", "kernel.backends=[fused3s,fused3s+reorder,fused3s_paper]")
MODELS = ("bench_end_to_end.py", "--results", f"{MEASURED}/end_to_end.csv", "--config")
BUILDS = ("preprocessing.py", "--results", f"{MEASURED}/preprocessing.csv", "--config")
STEPS: dict[str, list[tuple[str, ...]]] = {
    "smoke": [(*KERNELS, "configs/bench/smoke.yaml"), (*MODELS, "configs/end_to_end/smoke.yaml")],
    "roofline": [("roofline.py", "--results", f"{MEASURED}/roofline.csv")],
    "kernels": [(*KERNELS, f"configs/bench/{name}.yaml") for name in ("single", "batched")],
    "beyond": [(*KERNELS, f"configs/bench/{name}.yaml", *HALF_OUTPUT) for name in ("single", "batched")],
    "ablation": [(*KERNELS, "configs/bench/ablation.yaml")],
    "sm_active": [("sm_active_time.py", "--results", f"{MEASURED}/sm_active.csv")],
    "preprocessing": [(*BUILDS, f"configs/bench/{name}.yaml") for name in ("single", "batched")],
    "stability": [("stability.py", "--results", f"{MEASURED}/stability.csv")],
    "end_to_end": [(*MODELS, f"configs/end_to_end/{name}.yaml") for name in ("single", "batched")],
}
GROUPS = {"all": [name for name in STEPS if name != "smoke"], "none": []}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    steps: Annotated[list[str] | None, typer.Argument(metavar="STEP", help=", ".join([*GROUPS, *STEPS]))] = None,
) -> None:
    """Measure if there is a GPU, and draw."""
    chosen = chosen_steps(steps or ["all"])
    if not chosen:
        console.print(Text(f"nothing is measured; drawing from the CSVs recorded in {RECORDED}"))
    elif not torch.cuda.is_available():
        console.print(Text(f"no NVIDIA GPU found: nothing is measured; drawing from the CSVs recorded in {RECORDED}"))
        chosen = []
    failed = {name: status for name in chosen for command in STEPS[name] if (status := run(*command))}
    source = MEASURED if chosen else RECORDED
    drawn = run("make_figures.py", "--results", str(source), "--figures", str(source / "figures"))
    for name, status in failed.items():
        console.print(Text(f"failed     {name}: exit status {status}, see above"))
    raise typer.Exit(next(iter(failed.values()), drawn))


def chosen_steps(names: list[str]) -> list[str]:
    """The steps that `names` stand for, in the order in which they run."""
    unknown = [name for name in names if name not in STEPS and name not in GROUPS]
    if unknown:
        allowed = ", ".join([*GROUPS, *STEPS])
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; allowed are {allowed}", param_hint="FIGURES")
    wanted = {step for name in names for step in GROUPS.get(name, [name])}
    return [name for name in STEPS if name in wanted]


def run(script: str, *arguments: str) -> int:
    """The exit status of a script of this folder, run from the root with this Python."""
    console.print(Text(f"running    python scripts/{' '.join((script, *arguments))}"))
    return subprocess.run([sys.executable, f"scripts/{script}", *arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    app()
