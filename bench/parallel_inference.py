"""`scripts/infer.py` on several ranks: one graph in parts, or the batches of a collection shared out."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

import data
from bench.batches import SetRun
from bench.checks import accuracy, compare
from bench.cli import console, errors, print_end
from bench.inference import InferenceRun, report_table, result_rows, save_resolved_config, time_model
from bench.inputs import AllBatches, OneGraph, Write
from bench.memory import data_remedies, memory_for, run_remedies
from bench.predictions import predictions, row_arrays
from bench.records import append_rows
from bench.subject import Subject
from bench.timers import peak_memory_mib, reset_peak_memory
from configs import Config
from configs.resolve import check_machine, resolve_dtype
from data import LoadedGraph
from kernels import AttentionPlan
from models import Execution, GraphInputs, GraphTransformer, prepare_execution
from parallel import (
    Group,
    Part,
    PartAttention,
    all_values,
    check_agreement,
    gather_rows,
    on_first_rank,
)
from parallel.collectives import gather_uneven
from parallel.cost_model import LINKS, Choice
from parallel.datasets import gather_labels, loaded_part, open_part
from parallel.inputs import plan_model_attention, prepare_part, refuse_on_ranks, refuse_settings
from parallel.report import partition_lines
from parallel.sharing import share_of_batches
from parallel.training import hash_of_weights
from training.metrics import score_on_test
from training.weights import find_weights


def infer_on_ranks(
    config_path: Path, config: Config, group: Group, *, verify: bool, exact: bool, output: Path | None, results: Path
) -> bool:
    """Measure one run; rank 0 reports it and writes the files. False if the output differs from the reference."""
    options = f"--verify {verify} --accuracy {exact} --output {output is not None}"
    check_agreement(group, {"configuration": config.sha(), "options": options})
    console.print(Text(f"loading {config.data.name}"))
    with memory_for(f"loading {config.data.name}", lambda: data_remedies(config)):
        part = open_part(config.data, config.runtime.seed, group, lambda text: console.print(Text(text)))
        source = ShareOfBatches(config, group) if part is None else PartOfGraph(config, group, part)
    subject, runtime = source.subject, config.runtime
    meta, device, dtype = subject.loaded.meta, group.device, subject.dtype
    model = subject.model(dtype)
    check_agreement(group, {"weights": hash_of_weights(model), "graph": meta.sha256})
    with memory_for("running the model", lambda: run_remedies(config, meta, dtype)), torch.inference_mode():
        console.print(Text(f"building the sparse format on {device}"))
        start = time.perf_counter()
        attention = source.plan(model)
        if device.type == "cuda":
            torch.cuda.synchronize()
        format_build = (time.perf_counter() - start) * 1e3
        check_agreement(group, {"attention backend": attention.backend})
        execution = prepare_execution(
            model, source.inputs(model, attention), backend=attention.backend, dense=source.dense, cuda_graph=False
        )
        execution = replace(execution, graph_reason=source.graph_reason)
        console.print(Text(f"warm-up: {runtime.warmup}"))
        for _ in range(runtime.warmup):
            execution.run()
        reset_peak_memory(device)
        measured = *time_model(execution, runtime.repeats, device), format_build
        keep = group.is_first and (verify or exact or subject.weights.path is not None)
        arrays = row_arrays(source.whole) if group.is_first else {}
        with predictions(output if group.is_first else None, subject.output_shape, arrays, keep=keep) as found:
            whole = source.predict(execution, attention, found.append)
        peaks = all_values(group, peak_memory_mib(device))
        agreement = error = None
        if verify:
            console.print("comparing with the reference backend")
            expected = source.reference(model, dtype)
            agreement = compare(found.kept(), expected, dtype) if group.is_first else None
        if exact:
            console.print("comparing with the model in float32")
            expected = source.reference(subject.model(torch.float32), torch.float32)
            error = accuracy(found.kept(), expected) if group.is_first else None
    forward, share, waited, format_build = max(all_values(group, measured), key=lambda one: one[0].median)
    if not group.is_first:
        return True
    run = InferenceRun(
        config_path=config_path,
        config=config,
        meta=meta,
        backend=attention.backend,
        execution=execution,
        device=device,
        dtype=dtype,
        forward=forward,
        attention_share=share,
        waited=waited,
        peak_memory=max(peaks),
        format_build=format_build,
        agreement=agreement,
        order=None,
        accuracy=error,
        regions={},
        weights=subject.weights,
        score=score_on_test(found.kept(), source.whole) if subject.weights.path else None,
        whole=whole,
    )
    if output:
        console.print(Text(f"predictions  {found.values:,} logits in {output}"))
    console.print(report_table(run))
    table = Table("", f"Ranks: {group.size}; times and memory above are of the slowest and the fullest one")
    for name, text in {**source.lines(), "memory of each": ", ".join(f"{peak:,.0f} MiB" for peak in peaks)}.items():
        table.add_row(name, Text(text))
    console.print(table)
    rows = [row.model_copy(update=source.columns()) for row in result_rows(run)]
    append_rows(results, rows)
    console.print(Text(f"config       {save_resolved_config(config, results.parent)}"))
    print_end(f"{len(rows)} rows of run {rows[0].run_id}", results)
    if found.not_finite:
        errors.print(Text(f"warning: {found.not_finite} of {found.values} outputs are NaN or infinite"))
    return agreement is None or agreement.passed


class PartOfGraph:
    """This rank's rows of one graph.

    Attributes:
        subject: its `loaded` has labels and splits of these rows.
        whole: labels and splits of all rows on rank 0, else None.
        dense: implementation of the layers around attention.
    """

    graph_reason = "the ranks exchange rows within a pass"

    def __init__(self, config: Config, group: Group, part: Part) -> None:
        if config.data.batches != 1:
            raise ValueError(f"data.batches = {config.data.batches!r}: this is one graph; only 1 is allowed")
        refuse_settings(config)
        self.config, self.group, self.part = config, group, part
        self.subject = _subject(config, group, loaded_part(part))
        self.whole = gather_labels(part, group)
        self.dense = config.runtime.dense if part.num_rows else "plain"  # a kernel cannot be launched for no rows
        self._choice: Choice | None = None

    def plan(self, model: GraphTransformer) -> PartAttention:
        refuse_on_ranks(model, training=False)
        attention = plan_model_attention(self.part, self.group, self.config, self.subject.dtype)
        self._choice = attention.choice
        return attention

    def inputs(self, model: GraphTransformer, attention: PartAttention) -> GraphInputs:
        return prepare_part(model, self.part, attention)

    def predict(self, execution: Execution, attention: PartAttention, write: Write) -> None:
        """`write` gets all rows in the graph's order, on rank 0."""
        gather_rows(self.part, execution.run(), self.group, lambda rows: write(rows.float().cpu().numpy()))

    def reference(self, model: GraphTransformer, dtype: torch.dtype) -> Tensor | None:
        """Logits of the whole graph on rank 0's device by the backend "reference"; None on the other ranks."""

        def run() -> Tensor:
            chosen = self.config.data.model_dump(include={"name", "root", "source", "path"})
            loaded = data.load(**chosen, seed=self.config.runtime.seed)
            return OneGraph(loaded).logits(model, partial(self.subject.plan, backend="reference", dtype=dtype))

        return on_first_rank(self.group, run)

    def lines(self) -> dict[str, str]:
        """Lines of the report about the ranks."""
        return partition_lines(self.part, self.group, self._choice)

    def columns(self) -> dict[str, object]:
        """Columns of a row of results."""
        method = self.part.partition.method
        return {**_columns(self.group), "variant": self._choice.scheme, "order": method}


class ShareOfBatches:
    """This rank's batches of a collection: consecutive ones, so that the outputs of the ranks follow one another.

    Attributes:
        subject: its `loaded` holds all graphs.
        whole: the same.
        dense: as of `PartOfGraph`.
    """

    graph_reason = "the batches differ in size"

    def __init__(self, config: Config, group: Group) -> None:
        self.config, self.group = config, group
        arguments = config.load_arguments()
        # Rank 0 alone downloads.
        self.whole = on_first_rank(group, lambda: data.load(**arguments)) or data.load(**arguments)
        self.subject = _subject(config, group, self.whole)
        self.dense = config.runtime.dense
        self._share = share_of_batches(self.whole, config.data.batch_size, group)

    def plan(self, model: GraphTransformer) -> AttentionPlan:
        self._batches = AllBatches(self._share, model, self.config.data.batch_size, self.group.device)
        attention, dtype = self.config.attention, self.subject.dtype
        return self.subject.plan(self._batches.graph, attention.backend, dtype, attention.reorder)

    def inputs(self, model: GraphTransformer, attention: AttentionPlan) -> GraphInputs:
        return self._batches.inputs(model, attention)

    def predict(self, execution: Execution, attention: AttentionPlan, write: Write) -> SetRun:
        """`write` gets the logits of all graphs in their order, on rank 0."""
        parts: list[Tensor] = []
        plan = partial(
            self.subject.plan,
            backend=attention.backend,
            dtype=self.subject.dtype,
            reorder=self.config.attention.reorder,
        )
        all_values(self.group, None)  # the ranks start together
        repeats = self.config.runtime.repeats
        run = self._batches.predict(execution, plan, repeats, lambda logits: parts.append(torch.tensor(logits)))
        logits = gather_uneven(torch.cat(parts).to(self.group.device), self.group)
        if self.group.is_first:
            write(logits.cpu().numpy())
        # The ranks run at the same time: the slowest one's pass is the pass of all.
        passes = zip(*all_values(self.group, run.passes), strict=False)
        slowest = tuple(max(of_ranks, key=lambda one: one.seconds) for of_ranks in passes)
        num_batches = sum(all_values(self.group, run.num_batches))
        return replace(run, passes=slowest, num_graphs=self.whole.meta.num_graphs, num_batches=num_batches)

    def reference(self, model: GraphTransformer, dtype: torch.dtype) -> Tensor:
        """Logits of all graphs by the backend "reference"."""
        own = self._batches.logits(model, partial(self.subject.plan, backend="reference", dtype=dtype))
        return gather_uneven(own.to(self.group.device), self.group).cpu()

    def lines(self) -> dict[str, str]:
        """As of `PartOfGraph`."""
        return {"data parallel": "each rank runs consecutive batches of the collection; nothing is exchanged"}

    def columns(self) -> dict[str, object]:
        """As of `PartOfGraph`."""
        return {**_columns(self.group), "variant": "data parallel"}


def _subject(config: Config, group: Group, loaded: LoadedGraph) -> Subject:
    dtype = resolve_dtype(config.attention.dtype, group.device)
    check_machine(config, group.device, dtype)
    return Subject(config, group.device, dtype, loaded, find_weights(config, loaded.meta))


def _columns(group: Group) -> dict[str, object]:
    return {"ranks": group.size, "link": LINKS[group.link].name}
