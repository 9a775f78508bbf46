"""Measure on the GPU, then draw; without a GPU, draw the recorded CSVs. `make reproduce-figures`.

    python scripts/reproduce_figures.py [STEP ...] [--source auto]

Graphs are downloaded, or --source auto lets a synthetic surrogate take the place of one that cannot be had.

STEP is one or more of the names below; "all" is all except smoke and huge, "none" measures nothing. Measurements go to
results/local and figures to results/local/figures: nothing recorded is overwritten. An interrupted step resumes. At the
end the figures and the pages are drawn. Exit status: 0, or that of the first step that
failed; the other steps still run, and everything is drawn.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import torch
import typer
import yaml
from rich.text import Text

from bench.cli import console, short_errors
from report.rows import LOCAL

Source = Literal["official", "auto", "file", "synthetic"]
ROOT = Path(__file__).resolve().parent.parent
RECORDED, MEASURED = Path("results"), Path("results", LOCAL)
KERNELS = ("bench_kernels.py", "--results", f"{MEASURED}/kernels.csv", "--config")
# Our kernels with fp16 output; the other steps have fp32 output.
HALF_OUTPUT = ("--set", "kernel.out_dtype=float16", "--set", "kernel.backends=[fused3s,fused3s+reorder,fused3s_paper]")
HEADS = ("bench_kernels.py", "--results", f"{MEASURED}/heads.csv", "--config", "configs/bench/heads.yaml")
EDGES = ("bench_kernels.py", "--results", f"{MEASURED}/edges.csv", "--config", "configs/bench/edges.yaml")
BACKWARD = ("bench_kernels.py", "--results", f"{MEASURED}/backward.csv", "--config", "configs/bench/backward.yaml")
# The graph of configs/bench/surrogate_superpixels.yaml in place of the others.
SUPERPIXELS = ("--set", "data.names=[superpixel-bsds500]", "--set", "data.source=file", "--set", "data.batch_size=1000")
MODELS = ("bench_end_to_end.py", "--results", f"{MEASURED}/end_to_end.csv", "--config")
BUILDS = ("preprocessing.py", "--results", f"{MEASURED}/preprocessing.csv", "--config")
PLANS = ("bench_plans.py", "--results", f"{MEASURED}/plans.csv", "--config")
PARALLEL = ("bench_parallel.py", "--results", f"{MEASURED}/parallel.csv", "--config")
FLOAT32 = ("bench_kernels.py", "--results", f"{MEASURED}/float32.csv", "--config", "configs/bench/float32.yaml")
LAYERS = ("bench_layers.py", "--results", f"{MEASURED}/layers.csv", "--config", "configs/bench/layers.yaml")
GRAPHS = ("single", "batched", "more")  # files in configs/bench
MODEL_GRAPHS = ("single", "batched")  # files in configs/end_to_end
STEPS_OF_TRAINING = ("bench_training.py", "--results", f"{MEASURED}/training.csv", "--config")
# The model over all graphs of ogbg-molhiv, in batches of 1,024 that are planned anew.
COLLECTIONS = ("infer.py", "--results", f"{MEASURED}/infer.csv", "--config", "configs/infer/molhiv-all.yaml")
BATCHED_MODELS = [
    ("--set", f"model.heads={heads}", "--set", f"runtime.cuda_graph={graph}")
    for heads in (1, 8)
    for graph in ("auto", "true")
]
# Scores over several seeds: attention backend and precision.
TRAINED = {
    "bf16": ("fused3s", "bfloat16"),
    "fp16": ("fused3s", "float16"),
    "reference": ("reference", "float32"),
    "reference-bf16": ("reference", "bfloat16"),
}
SEEDS = {"cora": 10, "citeseer": 10, "ogbg-molhiv": 10}  # by file in configs/train
TRAININGS = [
    (
        *("train.py", "--resume", "--results", f"{MEASURED}/train.csv", "--config", f"configs/train/{name}.yaml"),
        *("--output", f"{MEASURED}/runs/{name}-{kind}", "--set", f"training.seeds={[*range(seeds)]}"),
        *("--set", f"attention.backend={backend}", "--set", f"training.precision={precision}"),
    )
    for name, seeds in SEEDS.items()
    for kind, (backend, precision) in TRAINED.items()
]
# The weights of "reference" in 16 bits.
USES_OF_WEIGHTS = [
    (
        *("infer.py", "--results", f"{MEASURED}/infer.csv", "--config", f"configs/train/{name}.yaml"),
        *("--checkpoint", f"{MEASURED}/runs/{name}-reference/seed_{seed}/best.safetensors"),
        *("--set", "attention.backend=fused3s", "--set", f"attention.dtype={precision}"),
        *(("--set", "data.batches=all") if name.startswith("ogbg") else ()),
    )
    for name, seeds in SEEDS.items()
    for seed in range(seeds)
    for precision in ("float16", "bfloat16")
]
STEPS: dict[str, list[tuple[str, ...]]] = {
    "smoke": [(*KERNELS, "configs/bench/smoke.yaml"), (*MODELS, "configs/end_to_end/smoke.yaml")],
    "layers": [LAYERS],
    "peak_rates": [("peak_rates.py", "--results", f"{MEASURED}/peak_rates.csv")],
    "kernels": [(*KERNELS, f"configs/bench/{name}.yaml") for name in GRAPHS],
    "float16_output": [(*KERNELS, f"configs/bench/{name}.yaml", *HALF_OUTPUT) for name in GRAPHS],
    "heads": [HEADS],
    "edges": [EDGES],
    "backward": [BACKWARD],
    "float32": [FLOAT32],
    "superpixels": [
        (*KERNELS, "configs/bench/surrogate_superpixels.yaml"),
        (*HEADS, *SUPERPIXELS),
        (*EDGES, *SUPERPIXELS),
        (*BACKWARD, *SUPERPIXELS),
        (*FLOAT32, *SUPERPIXELS),
    ],
    "training": [(*STEPS_OF_TRAINING, "configs/training_bench/single.yaml")],
    "train": TRAININGS + USES_OF_WEIGHTS,
    "masks": [(*KERNELS, "configs/bench/masks.yaml")],
    "ablation": [(*KERNELS, "configs/bench/ablation.yaml")],
    "sm_active": [("sm_active_time.py", "--results", f"{MEASURED}/sm_active.csv")],
    "preprocessing": [(*BUILDS, f"configs/bench/{name}.yaml") for name in GRAPHS],
    "plans": [(*PLANS, f"configs/plan_bench/{name}.yaml") for name in ("graphs", "reddit")],
    "collections": [(*COLLECTIONS, *options) for options in BATCHED_MODELS],
    "parallel": [(*PARALLEL, f"configs/parallel_bench/{name}.yaml") for name in ("single", "stand_ins")],
    "stability": [("stability.py", "--results", f"{MEASURED}/stability.csv")],
    "end_to_end": [(*MODELS, f"configs/end_to_end/{name}.yaml") for name in MODEL_GRAPHS],
    "end_to_end_fp32": [(*MODELS, f"configs/end_to_end/{name}_fp32.yaml") for name in MODEL_GRAPHS],
    "huge": [(*KERNELS, "configs/bench/huge.yaml")],
}
GROUPS = {"all": [name for name in STEPS if name not in ("smoke", "huge")], "none": []}
# Files that no command here fetches, by the step that reads them.
NEEDED = {"superpixels": Path("datasets", "superpixel-bsds500.npz")}

# Scripts whose graphs --source chooses, unless their configuration does.
WITH_SOURCE = (
    *("bench_kernels.py", "bench_end_to_end.py", "bench_training.py", "bench_plans.py", "bench_parallel.py"),
    *("bench_layers.py", "preprocessing.py"),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    steps: Annotated[list[str] | None, typer.Argument(metavar="STEP", help=", ".join([*GROUPS, *STEPS]))] = None,
    source: Annotated[
        Source | None, typer.Option(help="Where graphs come from (data.source of the benches): official by default.")
    ] = None,
) -> None:
    """Measure if there is a GPU, and draw."""
    chosen = chosen_steps(steps or ["all"])
    if not chosen:
        console.print(Text(f"nothing is measured; drawing from the CSVs recorded in {RECORDED}"))
    elif not torch.cuda.is_available():
        console.print(Text(f"no NVIDIA GPU found: nothing is measured; drawing from the CSVs recorded in {RECORDED}"))
        chosen = []
    for name, path in NEEDED.items():
        if name in chosen and not (ROOT / path).is_file():
            chosen.remove(name)
            console.print(Text(f"left out   {name}: reads {path}, which is not there and which no command fetches"))
    with short_errors(kept=lambda: f"what was measured is in {MEASURED}; the same command continues"):
        failed = {
            name: status for name in chosen for step in STEPS[name] if (status := run(*from_source(step, source)))
        }
        failed |= {
            command[0]: status for command in drawings(MEASURED if chosen else RECORDED) if (status := run(*command))
        }
    for name, status in failed.items():
        console.print(Text(f"failed     {name}: exit status {status}, see above"))
    raise typer.Exit(next(iter(failed.values()), 0))


def from_source(command: tuple[str, ...], source: Source | None) -> tuple[str, ...]:
    """The command with --source, where it loads graphs and leaves their source open."""
    if source is None or command[0] not in WITH_SOURCE or any("data.source=" in word for word in command):
        return command
    config = command[command.index("--config") + 1]
    if "source" in yaml.safe_load((ROOT / config).read_text(encoding="utf-8"))["data"]:
        return command
    return *command, "--set", f"data.source={source}"


def drawings(results: Path) -> list[tuple[str, ...]]:
    """Commands that draw the CSVs of a folder; they need no GPU. The tables of the README are of the recorded CSVs."""
    return [("report.py", "--results", str(results))]


def chosen_steps(names: list[str]) -> list[str]:
    """Steps of the given names, in the order in which they run."""
    unknown = [name for name in names if name not in STEPS and name not in GROUPS]
    if unknown:
        allowed = ", ".join([*GROUPS, *STEPS])
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; allowed are {allowed}", param_hint="FIGURES")
    wanted = {step for name in names for step in GROUPS.get(name, [name])}
    return [name for name in STEPS if name in wanted]


def run(script: str, *arguments: str) -> int:
    """Run a script of this folder from the root with this Python; its exit status."""
    console.print(Text(f"running    python scripts/{' '.join((script, *arguments))}"))
    process = subprocess.Popen([sys.executable, f"scripts/{script}", *arguments], cwd=ROOT)
    try:
        return process.wait()
    except KeyboardInterrupt:  # a terminal sends it to both: the script ends its step in its own way
        process.wait()
        raise


if __name__ == "__main__":
    app()
