"""`scripts/infer.py` on several ranks: the steps of `inference.run` on each, and one report of all."""

from dataclasses import replace

from rich.table import Table
from rich.text import Text

from bench.cli import console
from configs import Config
from inference.memory import data_remedies, memory_for
from inference.rank_inputs import PartOfGraph, ShareOfBatches
from inference.report import report_table, write_results
from inference.run import Cost, InferenceRun, Request, check, measure, running
from parallel import Group, all_values, check_agreement
from parallel.datasets import open_part
from parallel.training import hash_of_weights


def infer_on_ranks(request: Request, group: Group) -> bool:
    """Measure one run; rank 0 reports it and writes the files. False if the output differs from the reference."""
    options = f"--verify {request.verify} --accuracy {request.accuracy} --output {request.output is not None}"
    check_agreement(group, {"configuration": request.config.sha(), "options": options})
    source = load_source(request.config, group)
    check_agreement(group, {"weights": hash_of_weights(source.model), "graph": source.subject.loaded.meta.sha256})
    with running(source.subject):
        measured = measure(source, request)
        checks = check(source, measured.predictions, request)
    costs = all_values(group, measured.cost)
    if not group.is_first:
        return True
    run = InferenceRun(request, source.subject, replace(measured, cost=cost_of_all(costs)), checks)
    if request.output:
        console.print(Text(f"predictions  {measured.predictions.values:,} logits in {request.output}"))
    console.print(report_table(run))
    console.print(ranks_table(source, costs))
    write_results(run, source.columns())
    return checks.passed


def load_source(config: Config, group: Group) -> PartOfGraph | ShareOfBatches:
    """This rank's part of the graph, or its share of the collection."""
    console.print(Text(f"loading {config.data.name}"))
    with memory_for(f"loading {config.data.name}", lambda: data_remedies(config)):
        part = open_part(config.data, config.runtime.seed, group, lambda text: console.print(Text(text)))
        return ShareOfBatches(config, group) if part is None else PartOfGraph(config, group, part)


def cost_of_all(costs: list[Cost]) -> Cost:
    """Times of the slowest rank, and memory of the fullest one."""
    slowest = max(costs, key=lambda cost: cost.forward.median)
    return replace(slowest, peak_memory=max(cost.peak_memory for cost in costs))


def ranks_table(source: PartOfGraph | ShareOfBatches, costs: list[Cost]) -> Table:
    """A table of the ranks: the scheme, the partition and the memory of each rank."""
    table = Table("", f"Ranks: {len(costs)}; times and memory above are of the slowest and the fullest one")
    memory = ", ".join(f"{cost.peak_memory:,.0f} MiB" for cost in costs)
    for name, text in {**source.lines(), "memory of each": memory}.items():
        table.add_row(name, Text(text))
    return table
