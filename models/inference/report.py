"""Report and CSV rows of a run of `scripts/infer.py`."""

from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from common.cli import console, errors, print_end
from common.columns import dtype_name, run_columns
from common.host_load import describe_wait
from common.provenance import device_name
from common.records import NONE, Row, append_rows
from common.timers import Spread
from data import GraphMeta
from data.atomic import replacing
from fused3s.graph.reorder.row_order import RowOrder
from models import Execution
from models.inference.agreement import Agreement
from models.inference.source import Source
from models.metrics import Score
from models.trained_weights import weights_name

OPERATORS = 20  # that a profile shows


@dataclass
class Run:
    """The result of a run: what its report and its CSV rows are made from.

    Attributes:
        forward: ms of a forward pass; of the first batch, where there are several.
        attention_share: of it spent in attention, 0 to 1; None for layers that call a plan themselves.
        waited: share of the time in which threads waited for a core meanwhile, see `common.host_load`.
        format_build: ms to build the sparse format, once per graph or batch.
        peak_memory: MiB.
        logits: [rows, classes] float32; None on a rank that reports nothing.
        whole: graphs/s, share of a pass over all batches that the device spent in forward passes, 0 to 1, and ms of a
            batch's forward pass, by name of the metric; empty for one batch.
        agreement: with the reference backend; None if not compared.
        accuracy: against the model in float32; None if not compared.
        score: of trained weights on the labels; None for random weights and without labels.
    """

    source: Source
    execution: Execution
    forward: Spread
    attention_share: Spread | None
    waited: float | None
    format_build: float
    peak_memory: float
    logits: Tensor | None
    whole: dict[str, Spread]
    agreement: Agreement | None = None
    accuracy: Agreement | None = None
    score: Score | None = None


def surrogate_line(meta: GraphMeta, asked: str) -> Text | None:
    """What stands at the start and the end of the output of a run on a surrogate; None for a real graph.

    Args:
        asked: data.source.
    """
    if meta.source != "synthetic":
        return None
    why = "as configured" if asked == "synthetic" else f"data.source = {asked!r} found neither files nor a download"
    return Text(f"SYNTHETIC    {meta.name} is a surrogate, not the real graph ({why})")


def report_table(run: Run, title: str) -> Table:
    """Summary of the run in two columns."""
    source, execution, whole = run.source, run.execution, run.whole
    config, meta, attention = source.config, source.loaded.meta, execution.inputs.attention
    model = config.model
    origin = {"file": "from the file ", "synthetic": "SYNTHETIC surrogate, not the real graph: "}.get(meta.source, "")
    first = " of the first batch" if whole else ""
    busy = f"; {text}" if (text := describe_wait(run.waited)) else ""
    encoding = f", {model.pos_enc} Laplacian eigenvectors" if model.pos_enc else ""
    encoding += f", random walks of {model.random_walk} steps" if model.random_walk else ""
    edges = f", edge features as a {model.edge_features}" if meta.edge_features else ""
    chosen = " (chosen by auto)" if config.attention.backend == "auto" else ""
    peak = "on the GPU, during the forward passes" if source.device.type == "cuda" else "of the whole process"
    lines = {
        "data set": f"{meta.name}: {origin}{meta.origin}",
        "size": f"{meta.num_nodes:,} nodes, {meta.num_edges:,} edges{describe_graphs(meta)}",
        "features": f"{meta.feature_dim:,} {meta.feature_kind} columns, {meta.features}",
    }
    if meta.edge_features:
        kind = "categorical" if meta.edge_feature_cardinalities else "float"
        lines["edge features"] = f"{meta.edge_feature_dim:,} {kind} columns, {meta.edge_features}"
    lines |= {
        "model": f"{model.blocks} blocks, d = {model.dim}, heads = {model.heads}, {model.norm} norm{encoding}{edges}"
        if model.kind == "graph_transformer"
        else f"{model.blocks} layers ({model.kind}), d = {model.dim}, heads = {model.heads}, then {model.out_heads}",
        "weights": source.weights,
    }
    if run.score:
        lines[run.score.title] = run.score.describe()
    lines |= {
        "device": f"{source.device} ({device_name(source.device)})",
        "attention": f"{attention.backend}{chosen}",
        "other layers": f"{execution.path} ({execution.path_reason})",
        "CUDA graph": f"{'yes' if execution.captured else 'no'} ({execution.graph_reason})",
        "precision": dtype_name(source.dtype),
    }
    if whole:
        count, size = batches_of(source)
        batches = f"{count:,} batches of up to {size:,}, kept on {source.kept_on}"
        also = ", with assembly and plan" if execution.captured else ""
        lines |= {
            "all batches": f"{meta.num_graphs:,} graphs in {batches}",
            "throughput": _spread(whole["throughput"], "graphs/s", ",.0f"),
            "in forward passes": f"{whole['share_in_forward_passes'].median:.1%} of that time; "
            f"of a batch {_spread(whole['time'])}{also}",
        }
    lines[f"forward pass{first}"] = f"{_spread(run.forward)}{busy}"
    if run.attention_share:
        lines["in attention"] = f"{run.attention_share.median:.1%} of the forward pass{first}"
    lines |= {
        "peak memory": f"{run.peak_memory:,.0f} MiB {peak}",
        "format build": f"{run.format_build:.1f} ms{first or ' once for the graph'}, first-use compiling included",
    }
    if order := getattr(attention, "order", None):
        lines["row order"] = describe_order(order)
    if found := run.agreement:
        verdict = "agrees with the reference" if found.passed else "DIFFERS FROM the reference"
        lines["verification"] = f"{verdict}: {found.describe()}"
    if run.accuracy:
        same = run.accuracy.argmax_agreement
        classes = "" if same is None else f"{same:.2%} of the rows have the same largest output, "
        error = f"relative error {run.accuracy.relative:.1e}, largest {run.accuracy.max_abs:.1e}"
        lines["accuracy"] = f"against float32: {classes}{error}"
    table = Table("", title)
    for name, text in lines.items():
        table.add_row(name, Text(text))  # Text: square brackets in a path are not markup
    return table


def batches_of(source: Source) -> tuple[int, int]:
    """Number of batches, and the most graphs of one."""
    meta = source.loaded.meta
    size = source.config.data.graphs_per_batch(meta.num_graphs, meta.num_nodes)
    return -(-meta.num_graphs // size), size


def _spread(spread: Spread, unit: str = "ms", form: str = ".3f") -> str:
    median, p10, p90 = (format(value, form) for value in (spread.median, spread.p10, spread.p90))
    return f"{median} {unit} median (p10 {p10}, p90 {p90}, {spread.repeats} passes)"


def describe_graphs(meta: GraphMeta) -> str:
    """The number of graphs in words, such as ", 1,024 of 41,127 graphs"; empty for a single graph."""
    if meta.collection_size is None or meta.collection_size == meta.num_graphs:
        return f", {meta.num_graphs:,} graphs" if meta.num_graphs > 1 else ""
    return f", {meta.num_graphs:,} of {meta.collection_size:,} graphs"


def describe_order(order: RowOrder) -> str:
    kind = "natural order kept" if order.perm is None else order.method
    saved = 1 - order.columns_after / max(order.columns_before, 1)
    return f"{kind}: {saved:.1%} fewer gathered columns, found in {order.seconds:.2f} s"


def report_profile(run: Run, traces: Path, passes: int = 3) -> None:
    """Print times by operator, and save a trace in a folder: of eager passes, then of replays of a CUDA graph."""
    execution, on_gpu = run.execution, run.source.device.type == "cuda"
    trace = traces / f"{run.source.loaded.meta.name}_{run.source.config.sha()}.json"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.inference_mode(), profile(activities=activities, acc_events=True) as profiler:
        for _ in range(passes):
            with record_function("forward pass, eager"):
                execution.eager()
        for _ in range(passes if execution.captured else 0):
            with record_function("forward pass, CUDA graph"):
                execution.run()
        if on_gpu:
            torch.cuda.synchronize()
    with replacing(trace) as unfinished:
        profiler.export_chrome_trace(str(unfinished))
    order = f"self_{'device' if on_gpu else 'cpu'}_time_total"
    console.print(Text(profiler.key_averages().table(sort_by=order, row_limit=OPERATORS)))
    console.print(Text(f"trace        {trace}: open it with chrome://tracing or https://ui.perfetto.dev"))


def result_rows(run: Run, config_path: Path) -> list[Row]:
    """The run in the CSV schema, one row per measured value."""
    source, execution, whole = run.source, run.execution, run.whole
    checked = {"status": "unchecked"}
    if found := run.agreement:
        checked = {"status": "ok", "relative_error": found.relative}
        if not found.passed:
            checked |= {"status": "wrong", "reason": found.describe()}
    own = {
        "dtype": dtype_name(source.dtype),
        "out_dtype": dtype_name(source.dtype),
        "backend": execution.inputs.attention.backend,
        "dense": execution.path,
        "launch": "cuda_graph" if execution.captured else "eager",
        "checkpoint": weights_name(source.checkpoint),
        **checked,
        **source.columns(),
    }
    shared = run_columns("infer", config_path, source.config, source.loaded.meta, source.device, **own)

    def row(scope: str, metric: str, unit: str, spread: Spread | float, **columns: str) -> Row:
        spread = spread if isinstance(spread, Spread) else Spread.of([spread])
        return Row(**(shared | {"scope": scope, "metric": metric, "unit": unit} | spread.columns() | columns))

    part = {"region": "first batch"} if whole else {}
    rows = [row("model", "time", "ms", run.forward, note=describe_wait(run.waited) or NONE, **part)]
    if run.attention_share:
        rows.append(row("attention", "share_of_model_time", "1", run.attention_share, **part))
    rows += [
        row("model", "peak_memory", "MiB", run.peak_memory),
        row("build", "time", "ms", run.format_build, **part),
    ]
    if whole:
        count, size = batches_of(source)
        notes = {"throughput": f"{count:,} batches of {size:,}, kept on {source.kept_on.type}"}
        units = ("graphs/s", "1", "ms")
        rows += [
            row("model", metric, unit, spread, region="all batches", note=notes.get(metric, NONE))
            for (metric, spread), unit in zip(whole.items(), units, strict=True)
        ]
    if run.score:
        rows.append(row("model", f"{run.score.part}_{run.score.metric}", run.score.unit or "1", run.score.value))
    if found := run.accuracy:
        measured = {"argmax_agreement": found.argmax_agreement, "output_error": found.relative}
        note = {"note": "against float32"}
        rows += [row("model", name, "1", value, **note) for name, value in measured.items() if value is not None]
    return rows


def write_results(run: Run, config_path: Path, results: Path) -> None:
    """Append the run's rows to a CSV, save its configuration beside it, print where, and warn of NaN."""
    config, rows = run.source.config, result_rows(run, config_path)
    append_rows(results, rows)
    saved = results.parent / "configs" / f"{config.sha()}.yaml"
    with replacing(saved) as unfinished:
        unfinished.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False), encoding="utf-8")
    console.print(Text(f"config       {saved}"))
    print_end(f"{len(rows)} rows of run {rows[0].run_id}", results)
    if not_finite := int((~run.logits.isfinite()).sum()):
        errors.print(Text(f"warning: {not_finite} of {run.logits.numel()} outputs are NaN or infinite"))
