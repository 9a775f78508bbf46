"""Timing, report and CSV rows of one run of `scripts/infer.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from rich.table import Table
from rich.text import Text

from bench.batches import SetRun
from bench.checks import Accuracy, Agreement
from bench.cli import console
from bench.host_load import HostLoad, describe_wait
from bench.model_regions import time_attention, time_regions
from bench.provenance import device_name, provenance
from bench.records import NONE, Row
from bench.runner import dtype_name, graph_columns
from bench.timers import Spread, time_passes, times_inside
from configs import Config
from data import GraphMeta
from data.atomic import replacing
from kernels.formats.row_order import RowOrder
from models import Execution
from training.metrics import Score
from training.weights import Weights


@dataclass(frozen=True)
class InferenceRun:
    """Settings and results of a run.

    Attributes:
        backend: attention backend that ran, never "auto".
        forward: ms of a forward pass; of the first batch, where there are several.
        attention_share: share of it spent in attention, 0 to 1.
        waited: share of the time in which threads waited for a core meanwhile, see `bench.host_load`.
        peak_memory: MiB.
        format_build: ms to build the sparse format, once per graph or batch.
        whole: all batches; None for one.
        agreement: with the reference backend; None if not compared.
        order: row order inside attention; None if none was asked for.
        accuracy: against float32; None if not compared.
        regions: ms of each region of an eager pass, see `bench.model_regions`; empty if not profiled.
        weights: the model's.
        score: metric of trained weights on the labels; None for random weights and without labels.
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
    waited: float | None
    peak_memory: float
    format_build: float
    agreement: Agreement | None
    order: RowOrder | None
    accuracy: Accuracy | None
    regions: Mapping[str, Spread]
    weights: Weights
    score: Score | None
    whole: SetRun | None = None


def time_model(execution: Execution, repeats: int, device: torch.device) -> tuple[Spread, Spread, float | None]:
    """Milliseconds of a forward pass, the share of attention in it, and that of waiting for a core (`HostLoad`)."""
    console.print(Text(f"timing forward passes: {repeats}"))
    load = HostLoad()
    forward = time_passes(execution.run, device=device, repeats=repeats)
    waited = load.waited()
    few = max(1, repeats // 4)  # a share needs fewer passes than percentiles do
    console.print(Text(f"timing attention inside: {few}"))
    if execution.captured:
        attention = time_attention(execution, device=device, repeats=few)
        shares = [milliseconds / forward.median for milliseconds in (attention.median, attention.p10, attention.p90)]
        return forward, Spread(*shares, attention.repeats), waited
    # Of the same passes: whatever else slows one down, its share stays below 1.
    inside, whole = times_inside(execution.eager, execution.inputs.attention, device=device, repeats=few)
    return forward, Spread.of([part / full for part, full in zip(inside, whole, strict=True)]), waited


def time_parts(execution: Execution, repeats: int, device: torch.device) -> dict[str, Spread]:
    """Milliseconds of each region of an eager pass."""
    few = max(1, repeats // 4)
    console.print(Text(f"timing the model's parts: {few}"))
    execution.eager()
    eager = time_passes(execution.eager, device=device, repeats=few)
    return time_regions(execution, eager_ms=eager.median, device=device, repeats=few)


_ORIGIN = {
    "official": "{origin}",
    "file": "from the file {origin}",
    "synthetic": "SYNTHETIC surrogate, not the real graph: {origin}",
}


def report_table(run: InferenceRun) -> Table:
    """Summary of the run in two columns."""
    meta, model, forward = run.meta, run.config.model, run.forward
    first = " of the first batch" if run.whole else ""
    busy = f"; {text}" if (text := describe_wait(run.waited)) else ""
    encoding = f", {model.pos_enc} Laplacian eigenvectors" if model.pos_enc else ""
    chosen = " (chosen by auto)" if run.config.attention.backend == "auto" else ""
    edges = f", edge features as a {model.edge_features}" if meta.edge_features else ""
    execution = run.execution
    peak = "on the GPU, during the forward passes" if run.device.type == "cuda" else "of the whole process"
    lines = {
        "data set": f"{meta.name}: {_ORIGIN[meta.source].format(origin=meta.origin)}",
        "size": f"{meta.num_nodes:,} nodes, {meta.num_edges:,} edges{describe_graphs(meta)}",
        "features": f"{meta.feature_dim:,} {meta.feature_kind} columns, {meta.features}",
        **_edge_lines(meta),
        "model": f"{model.blocks} blocks, d = {model.dim}, heads = {model.heads}, {model.norm} norm{encoding}{edges}",
        "weights": run.weights.describe(),
        **({} if run.score is None else {run.score.title: run.score.describe()}),
        "device": f"{run.device} ({device_name(run.device)})",
        "attention": f"{run.backend}{chosen}",
        "other layers": f"{execution.dense.path} ({execution.dense.reason})",
        "CUDA graph": f"{'yes' if execution.captured else 'no'} ({execution.graph_reason})",
        "precision": dtype_name(run.dtype),
        **({} if run.whole is None else _whole_lines(run.whole)),
        f"forward pass{first}": (
            f"{forward.median:.3f} ms median (p10 {forward.p10:.3f}, p90 {forward.p90:.3f}, {forward.repeats} "
            f"passes){busy}"
        ),
        "in attention": f"{run.attention_share.median:.1%} of the forward pass{first}",
        "peak memory": f"{run.peak_memory:,.0f} MiB {peak}",
        "format build": (f"{run.format_build:.1f} ms{first or ' once for the graph'}, first-use compiling included"),
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


def describe_graphs(meta: GraphMeta) -> str:
    """The number of graphs in words, such as ", 1,024 of 41,127 graphs"; empty for a single graph."""
    if meta.collection_size is None or meta.collection_size == meta.num_graphs:
        return f", {meta.num_graphs:,} graphs" if meta.num_graphs > 1 else ""
    return f", {meta.num_graphs:,} of {meta.collection_size:,} graphs"


def _whole_lines(whole: SetRun) -> dict[str, str]:
    rate, forward = whole.graphs_per_second, whole.forward
    runs = f"{rate.repeats} passes" if rate.repeats > 1 else "1 pass"
    return {
        "all batches": (
            f"{whole.num_graphs:,} graphs in {whole.num_batches:,} batches of up to {whole.batch_size:,}, "
            f"kept on {whole.kept_on}"
        ),
        "throughput": f"{rate.median:,.0f} graphs/s median (p10 {rate.p10:,.0f}, p90 {rate.p90:,.0f}, {runs})",
        "in forward passes": (
            f"{whole.share.median:.1%} of that time, {forward.median:.3f} ms a batch (p10 {forward.p10:.3f}, p90 "
            f"{forward.p90:.3f})"
        ),
    }


def _edge_lines(meta: GraphMeta) -> dict[str, str]:
    if not meta.edge_features:
        return {}
    kind = "categorical" if meta.edge_feature_cardinalities else "float"
    return {"edge features": f"{meta.edge_feature_dim:,} {kind} columns, {meta.edge_features}"}


def describe_accuracy(accuracy: Accuracy) -> str:
    same = accuracy.argmax_agreement
    classes = "" if same is None else f"{same:.2%} of the rows have the same largest output, "
    return f"against float32: {classes}relative error {accuracy.relative:.1e}, largest {accuracy.max_abs:.1e}"


def region_table(regions: Mapping[str, Spread]) -> Table:
    """Time of each region of an eager pass."""
    total = sum(spread.median for spread in regions.values())
    table = Table("region", "ms", "share", title="Time of an eager forward pass")
    for region, spread in regions.items():
        table.add_row(region, f"{spread.median:.4f}", f"{spread.median / total:.1%}")
    return table


def result_rows(run: InferenceRun) -> list[Row]:
    """The run in the CSV schema, one row per measured value."""
    checked = {"status": "unchecked"}
    if run.agreement:
        checked = {"status": "ok", "relative_error": run.agreement.relative}
        if not run.agreement.passed:
            checked |= {"status": "wrong", "reason": run.agreement.describe()}
    shared = {
        **provenance(run.device).model_dump(),
        **checked,
        **graph_columns(run.meta),
        "bench": "infer",
        "dim": run.config.model.dim,
        "heads": run.config.model.heads,
        "blocks": run.config.model.blocks,
        "edges": run.config.model.edge_features,
        "checkpoint": run.weights.name,
        "dtype": dtype_name(run.dtype),
        "out_dtype": dtype_name(run.dtype),
        "backend": run.backend,
        "order": run.config.attention.reorder,
        "dense": run.execution.dense.path,
        "launch": "cuda_graph" if run.execution.captured else "eager",
        "config": str(run.config_path),
        "config_sha": run.config.sha(),
    }

    def row(scope: str, metric: str, unit: str, spread: Spread, **columns: str) -> Row:
        return Row(**(shared | {"scope": scope, "metric": metric, "unit": unit} | spread.columns() | columns))

    part = {"region": "first batch"} if run.whole else {}
    rows = [
        row("model", "time", "ms", run.forward, note=describe_wait(run.waited) or NONE, **part),
        row("attention", "share_of_model_time", "1", run.attention_share, **part),
        row("model", "peak_memory", "MiB", Spread.of([run.peak_memory])),
        row("build", "time", "ms", Spread.of([run.format_build]), **part),
    ]
    if run.whole:
        batches = f"{run.whole.num_batches:,} batches of {run.whole.batch_size:,}, kept on {run.whole.kept_on.type}"
        rows += [
            row("model", "throughput", "graphs/s", run.whole.graphs_per_second, region="all batches", note=batches),
            row("model", "share_in_forward_passes", "1", run.whole.share, region="all batches"),
            row("model", "time", "ms", run.whole.forward, region="all batches"),
        ]
    rows += [row("model", "time", "ms", spread, region=name, launch="eager") for name, spread in run.regions.items()]
    if run.score:
        rows.append(row("model", f"{run.score.part}_{run.score.metric}", "1", Spread.of([run.score.value])))
    if run.accuracy:
        measured = {"argmax_agreement": run.accuracy.argmax_agreement, "output_error": run.accuracy.relative}
        rows += [
            row("model", metric, "1", Spread.of([value]), note="against float32")
            for metric, value in measured.items()
            if value is not None
        ]
    return rows


def save_resolved_config(config: Config, folder: Path) -> Path:
    """Write the configuration with defaults and overrides to configs/SHA.yaml in `folder`; its path."""
    path = folder / "configs" / f"{config.sha()}.yaml"
    with replacing(path) as unfinished:
        unfinished.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False), encoding="utf-8")
    return path
