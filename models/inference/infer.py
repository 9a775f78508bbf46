"""A run of `scripts/infer.py` from the loaded source to the rows of results."""

import torch
from rich.text import Text

import data
from common.cli import console, describe_config, errors
from configs import Config
from models.inference.memory import memory_for
from models.inference.predictions import check_forms, save_predictions
from models.inference.report import report_profile, report_table, surrogate_line, write_results
from models.inference.run import Request, check, cost_of_all, measure, time_parts
from models.inference.source import Source
from models.machine import check_machine, resolve_device, resolve_dtype
from models.trained_weights import named_weights


def infer(request: Request, source: Source, kept: list[str]) -> bool:
    """Measure and report one run, on several ranks by rank 0; False if the output differs from the reference.

    `kept` gets the file of predictions once it is written.
    """
    config, meta = request.config, source.loaded.meta
    check_forms(request.forms, source.loaded)
    if surrogate := surrogate_line(meta, config.data.source):
        console.print(surrogate)
    console.print(describe_config(f"{request.config_path} ({config.sha()})", config, hidden="training"))
    with memory_for("running the model", config), torch.inference_mode():
        run = measure(source, request)
        if request.output and run.logits is not None:
            save_predictions(request.output, run.logits, source.rows, request.forms)
            kept.append(f"the predictions in {request.output}")
            console.print(Text(f"predictions  {run.logits.shape[0]:,} x {run.logits.shape[1]} in {request.output}"))
        if request.profile:
            run.regions = time_parts(run.execution, config.runtime.repeats, source.device)
        check(run)
    costs = source.costs(run.cost)
    if run.logits is None:
        return True
    run.cost = cost_of_all(costs)
    console.print(report_table(run))
    if table := source.ranks_table(costs):
        console.print(table)
    if request.profile:
        report_profile(run)
    write_results(run)
    if surrogate:
        console.print(surrogate)
    return run.agreement is None or run.agreement.passed


def load_source(config: Config) -> Source:
    """Load the graphs and the weights of a configuration.

    Raises:
        ValueError: before anything is loaded, if this machine cannot run the configuration.
    """
    device = resolve_device(config.runtime.device)
    check_machine(config, device, resolve_dtype(config.attention.dtype, device))
    named_weights(config)  # a missing file is found before a long load
    name, batches = config.data.name, config.data.batches
    errors.print(Text(f"loading {name}"))
    with memory_for(f"loading {name}", config):
        loaded = data.load(**config.load_arguments())
    if batches == 1:
        return Source(config, device, loaded)
    if loaded.meta.num_graphs == 1:
        raise ValueError(f"data.batches = {batches!r}: {loaded.meta.origin} holds one graph; only 1 is allowed")
    from models.inference.all_batches import AllBatches  # on use: of collections alone

    return AllBatches(config, device, loaded)
