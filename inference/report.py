"""Report and CSV rows of a run of `scripts/infer.py`."""

from collections.abc import Mapping
from pathlib import Path

import torch
import yaml
from rich.table import Table
from rich.text import Text

from bench.checks import Accuracy
from bench.cli import console, errors, print_end
from bench.host_load import describe_wait
from bench.model_regions import save_trace
from bench.provenance import device_name, provenance
from bench.records import NONE, Row, append_rows
from bench.runner import dtype_name, graph_columns
from bench.timers import Spread
from configs import Config
from data import GraphMeta
from data.atomic import replacing
from inference.batches import SetRun
from inference.run import Checks, InferenceRun
from kernels.formats.row_order import RowOrder

_ORIGIN = {
    "official": "{origin}",
    "file": "from the file {origin}",
    "synthetic": "SYNTHETIC surrogate, not the real graph: {origin}",
}


def report_table(run: InferenceRun) -> Table:
    """Summary of the run in two columns."""
    config, subject, execution = run.request.config, run.subject, run.measured.execution
    meta, model, cost, whole = subject.loaded.meta, config.model, run.measured.cost, run.measured.whole
    first = " of the first batch" if whole else ""
    busy = f"; {text}" if (text := describe_wait(cost.waited)) else ""
    encoding = f", {model.pos_enc} Laplacian eigenvectors" if model.pos_enc else ""
    chosen = " (chosen by auto)" if config.attention.backend == "auto" else ""
    edges = f", edge features as a {model.edge_features}" if meta.edge_features else ""
    peak = "on the GPU, during the forward passes" if subject.device.type == "cuda" else "of the whole process"
    forward, score = cost.forward, run.checks.score
    lines = {
        "data set": f"{meta.name}: {_ORIGIN[meta.source].format(origin=meta.origin)}",
        "size": f"{meta.num_nodes:,} nodes, {meta.num_edges:,} edges{describe_graphs(meta)}",
        "features": f"{meta.feature_dim:,} {meta.feature_kind} columns, {meta.features}",
        **_edge_lines(meta),
        "model": f"{model.blocks} blocks, d = {model.dim}, heads = {model.heads}, {model.norm} norm{encoding}{edges}",
        "weights": subject.weights.describe(),
        **({} if score is None else {score.title: score.describe()}),
        "device": f"{subject.device} ({device_name(subject.device)})",
        "attention": f"{run.measured.attention.backend}{chosen}",
        "other layers": f"{execution.dense.path} ({execution.dense.reason})",
        "CUDA graph": f"{'yes' if execution.captured else 'no'} ({execution.graph_reason})",
        "precision": dtype_name(subject.dtype),
        **({} if whole is None else _whole_lines(whole, execution.captured is not None)),
        f"forward pass{first}": (
            f"{forward.median:.3f} ms median (p10 {forward.p10:.3f}, p90 {forward.p90:.3f}, {forward.repeats} "
            f"passes){busy}"
        ),
        "in attention": f"{cost.attention_share.median:.1%} of the forward pass{first}",
        "peak memory": f"{cost.peak_memory:,.0f} MiB {peak}",
        "format build": (f"{cost.format_build:.1f} ms{first or ' once for the graph'}, first-use compiling included"),
        **({} if run.order is None else {"row order": describe_order(run.order)}),
        **_check_lines(run.checks),
    }
    table = Table("", "Graph Transformer inference")
    for name, text in lines.items():
        table.add_row(name, Text(text))  # Text: square brackets in a path are not markup
    return table


def describe_graphs(meta: GraphMeta) -> str:
    """The number of graphs in words, such as ", 1,024 of 41,127 graphs"; empty for a single graph."""
    if meta.collection_size is None or meta.collection_size == meta.num_graphs:
        return f", {meta.num_graphs:,} graphs" if meta.num_graphs > 1 else ""
    return f", {meta.num_graphs:,} of {meta.collection_size:,} graphs"


def _whole_lines(whole: SetRun, captured: bool) -> dict[str, str]:
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
            f"{forward.p90:.3f}{', with assembly and plan' if captured else ''})"
        ),
    }


def _edge_lines(meta: GraphMeta) -> dict[str, str]:
    if not meta.edge_features:
        return {}
    kind = "categorical" if meta.edge_feature_cardinalities else "float"
    return {"edge features": f"{meta.edge_feature_dim:,} {kind} columns, {meta.edge_features}"}


def describe_order(order: RowOrder) -> str:
    kind = "natural order kept" if order.perm is None else order.method
    saved = 1 - order.columns_after / max(order.columns_before, 1)
    return f"{kind}: {saved:.1%} fewer gathered columns, found in {order.seconds:.2f} s"


def _check_lines(checks: Checks) -> dict[str, str]:
    lines = {}
    if agreement := checks.agreement:
        verdict = "agrees with" if agreement.passed else "DIFFERS FROM"
        lines["verification"] = (
            f"{verdict} the reference: largest difference {agreement.max_abs:.1e} "
            f"(allowed {agreement.allowed_abs:.1e}), relative {agreement.relative:.1e} "
            f"(allowed {agreement.allowed:.1e})"
        )
    if checks.accuracy:
        lines["accuracy"] = describe_accuracy(checks.accuracy)
    return lines


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


def report_profile(run: InferenceRun) -> None:
    """Print the time of each region, and save a trace of the run beside its results."""
    console.print(region_table(run.regions))
    name, sha = run.subject.loaded.meta.name, run.request.config.sha()
    trace = run.request.results.parent / "traces" / f"{name}_{sha}.json"
    with torch.inference_mode(), replacing(trace) as unfinished:
        save_trace(run.measured.execution, unfinished)
    console.print(Text(f"trace        {trace}: open it with chrome://tracing or https://ui.perfetto.dev"))


def result_rows(run: InferenceRun) -> list[Row]:
    """The run in the CSV schema, one row per measured value."""
    config, subject, execution = run.request.config, run.subject, run.measured.execution
    checks, cost, whole = run.checks, run.measured.cost, run.measured.whole
    checked = {"status": "unchecked"}
    if checks.agreement:
        checked = {"status": "ok", "relative_error": checks.agreement.relative}
        if not checks.passed:
            checked |= {"status": "wrong", "reason": checks.agreement.describe()}
    shared = {
        **provenance(subject.device).model_dump(),
        **checked,
        **graph_columns(subject.loaded.meta),
        "bench": "infer",
        "dim": config.model.dim,
        "heads": config.model.heads,
        "blocks": config.model.blocks,
        "edges": config.model.edge_features,
        "checkpoint": subject.weights.name,
        "dtype": dtype_name(subject.dtype),
        "out_dtype": dtype_name(subject.dtype),
        "backend": run.measured.attention.backend,
        "order": config.attention.reorder,
        "dense": execution.dense.path,
        "launch": "cuda_graph" if execution.captured else "eager",
        "config": str(run.request.config_path),
        "config_sha": config.sha(),
    }

    def row(scope: str, metric: str, unit: str, spread: Spread, **columns: str) -> Row:
        return Row(**(shared | {"scope": scope, "metric": metric, "unit": unit} | spread.columns() | columns))

    part = {"region": "first batch"} if whole else {}
    rows = [
        row("model", "time", "ms", cost.forward, note=describe_wait(cost.waited) or NONE, **part),
        row("attention", "share_of_model_time", "1", cost.attention_share, **part),
        row("model", "peak_memory", "MiB", Spread.of([cost.peak_memory])),
        row("build", "time", "ms", Spread.of([cost.format_build]), **part),
    ]
    if whole:
        batches = f"{whole.num_batches:,} batches of {whole.batch_size:,}, kept on {whole.kept_on.type}"
        rows += [
            row("model", "throughput", "graphs/s", whole.graphs_per_second, region="all batches", note=batches),
            row("model", "share_in_forward_passes", "1", whole.share, region="all batches"),
            row("model", "time", "ms", whole.forward, region="all batches"),
        ]
    rows += [row("model", "time", "ms", spread, region=name, launch="eager") for name, spread in run.regions.items()]
    if score := checks.score:
        rows.append(row("model", f"{score.part}_{score.metric}", "1", Spread.of([score.value])))
    if checks.accuracy:
        measured = {"argmax_agreement": checks.accuracy.argmax_agreement, "output_error": checks.accuracy.relative}
        rows += [
            row("model", metric, "1", Spread.of([value]), note="against float32")
            for metric, value in measured.items()
            if value is not None
        ]
    return rows


def write_results(run: InferenceRun, columns: Mapping[str, object] | None = None) -> None:
    """Append the run's rows, changed in `columns`, to its CSV; save its configuration; print where, and warnings."""
    results, found = run.request.results, run.measured.predictions
    rows = [row.model_copy(update=columns) for row in result_rows(run)]
    append_rows(results, rows)
    console.print(Text(f"config       {save_resolved_config(run.request.config, results.parent)}"))
    print_end(f"{len(rows)} rows of run {rows[0].run_id}", results)
    if found.not_finite:
        errors.print(Text(f"warning: {found.not_finite} of {found.values} outputs are NaN or infinite"))


def save_resolved_config(config: Config, folder: Path) -> Path:
    """Write the configuration with defaults and overrides to configs/SHA.yaml in `folder`; its path."""
    path = folder / "configs" / f"{config.sha()}.yaml"
    with replacing(path) as unfinished:
        unfinished.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False), encoding="utf-8")
    return path
