"""One run of `scripts/infer.py`: its report for a reader and its rows for the CSV."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from rich.table import Table
from rich.text import Text

from bench.accuracy import Accuracy
from bench.provenance import device_name, provenance
from bench.records import Row, graph_columns
from bench.timers import Spread
from bench.verify import Agreement
from configs import Config
from data import GraphMeta
from kernels.formats.row_order import RowOrder
from models import Execution


@dataclass(frozen=True)
class InferenceRun:
    """What was run and what was found out.

    Attributes:
        backend: the attention back end that ran, never "auto".
        execution: how the forward pass was run.
        forward: ms of a forward pass.
        attention_share: share of a forward pass spent in attention, 0 to 1.
        peak_memory: MiB.
        format_build: ms to build the sparse format, once for each graph.
        agreement: with the reference back end; None if it was not compared.
        order: of the rows inside attention; None if none was asked for.
        accuracy: against float32; None if it was not compared.
        regions: ms of each region of an eager pass (see `bench.model_regions`); empty if not profiled.
    """

    config_path: Path
    config: Config
    meta: GraphMeta
    backend: str
    execution: Execution
    device: torch.device
    dtype: torch.dtype
    forward: Spread
    attention_share: Spread
    peak_memory: float
    format_build: float
    agreement: Agreement | None
    order: RowOrder | None
    accuracy: Accuracy | None
    regions: Mapping[str, Spread]

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")


_ORIGIN = {
    "official": "{origin}",
    "file": "from the file {origin}",
    "synthetic": "SYNTHETIC stand-in, not the real graph: {origin}",
}


def report_table(run: InferenceRun) -> Table:
    """What a user wants to know, in two columns."""
    meta, model, forward = run.meta, run.config.model, run.forward
    graphs = f", {meta.num_graphs:,} graphs" if meta.num_graphs > 1 else ""
    encoding = f", {model.pos_enc} Laplacian eigenvectors" if model.pos_enc else ""
    chosen = " (chosen by auto)" if run.config.attention.backend == "auto" else ""
    execution = run.execution
    whose = "on the GPU, during the forward passes" if run.device.type == "cuda" else "of the whole process"
    lines = {
        "data set": f"{meta.name}: {_ORIGIN[meta.source].format(origin=meta.origin)}",
        "size": f"{meta.num_nodes:,} nodes, {meta.num_edges:,} edges{graphs}",
        "features": f"{meta.feature_dim:,} {meta.feature_kind} columns, {meta.features}",
        "model": f"{model.blocks} blocks, d = {model.dim}, heads = {model.heads}, {model.norm} norm{encoding}",
        "device": f"{run.device} ({device_name(run.device)})",
        "attention": f"{run.backend}{chosen}",
        "dense part": f"{execution.dense.path} ({execution.dense.reason})",
        "CUDA graph": f"{'yes' if execution.captured else 'no'} ({execution.graph_reason})",
        "precision": run.precision,
        "forward pass": (
            f"{forward.median:.3f} ms median (p10 {forward.p10:.3f}, p90 {forward.p90:.3f}, {forward.repeats} passes)"
        ),
        "in attention": f"{run.attention_share.median:.1%} of the forward pass",
        "peak memory": f"{run.peak_memory:,.0f} MiB {whose}",
        "format build": f"{run.format_build:.1f} ms once for the graph, first-use compiling included",
    }
    if run.order:
        kind = "natural order kept" if run.order.perm is None else run.order.method
        saved = 1 - run.order.columns_after / max(run.order.columns_before, 1)
        lines["row order"] = f"{kind}: {saved:.1%} fewer gathered columns, found in {run.order.seconds:.2f} s"
    if run.agreement:
        verdict = "agrees with" if run.agreement.passed else "DIFFERS FROM"
        lines["verification"] = (
            f"{verdict} the reference: largest difference {run.agreement.max_abs:.1e} "
            f"(allowed {run.agreement.allowed_abs:.1e}), relative {run.agreement.relative:.1e} "
            f"(allowed {run.agreement.allowed:.1e})"
        )
    if run.accuracy:
        lines["accuracy"] = describe_accuracy(run.accuracy)
    table = Table("", "Graph Transformer inference")
    for name, text in lines.items():
        table.add_row(name, Text(text))  # Text: square brackets in a path are not markup
    return table


def describe_accuracy(accuracy: Accuracy) -> str:
    same = accuracy.argmax_agreement
    classes = "" if same is None else f"{same:.2%} of the rows have the same largest output, "
    return f"against float32: {classes}relative error {accuracy.relative:.1e}, largest {accuracy.max_abs:.1e}"


def region_table(regions: Mapping[str, Spread]) -> Table:
    """Where an eager pass spends its time."""
    total = sum(spread.median for spread in regions.values())
    table = Table("region", "ms", "share", title="Where an eager forward pass spends its time")
    for region, spread in regions.items():
        table.add_row(region, f"{spread.median:.4f}", f"{spread.median / total:.1%}")
    return table


def result_rows(run: InferenceRun) -> list[Row]:
    """The run in the repository's CSV schema, a row for each measured value."""
    if run.agreement is None:
        checked = {"status": "unchecked"}
    elif run.agreement.passed:
        checked = {"status": "ok", "relative_error": run.agreement.relative}
    else:
        checked = {
            "status": "wrong",
            "reason": run.agreement.describe(),
            "relative_error": run.agreement.relative,
        }
    shared = {
        **provenance(run.device).model_dump(),
        **checked,
        **graph_columns(run.meta),
        "dim": run.config.model.dim,
        "heads": run.config.model.heads,
        "blocks": run.config.model.blocks,
        "dtype": run.precision,
        "out_dtype": run.precision,
        "backend": run.backend,
        "config": str(run.config_path),
        "config_sha": run.config.sha(),
    }
    mode = run.execution.mode

    def row(scope: str, metric: str, unit: str, spread: Spread, note: str = mode) -> Row:
        return Row(scope=scope, metric=metric, unit=unit, note=note, **spread.columns(), **shared)

    rows = [
        row("model", "time", "ms", run.forward),
        row("attention", "share_of_model_time", "1", run.attention_share),
        row("model", "peak_memory", "MiB", Spread.of([run.peak_memory])),
        row("build", "time", "ms", Spread.of([run.format_build])),
    ]
    eager = run.execution.dense.path
    rows += [row("model", f"time in {region}", "ms", spread, eager) for region, spread in run.regions.items()]
    if run.accuracy:
        measured = {"argmax_agreement": run.accuracy.argmax_agreement, "output_error": run.accuracy.relative}
        note = f"{mode}; against float32"
        rows += [
            row("model", metric, "1", Spread.of([value]), note)
            for metric, value in measured.items()
            if value is not None
        ]
    return rows


def save_resolved_config(config: Config, folder: Path) -> Path:
    """Write what the configuration resolved to, defaults and overrides included, to configs/SHA.yaml in `folder`."""
    path = folder / "configs" / f"{config.sha()}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False), encoding="utf-8")
    return path
