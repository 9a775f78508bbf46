"""A run of `scripts/infer.py` from the loaded source to the rows of results."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.text import Text

import data
from common.cli import console, describe_config, errors
from configs import Config
from models.inference.memory import memory_for
from models.inference.predictions import Form, check_forms, save_predictions
from models.inference.report import report_profile, report_table, surrogate_line, write_results
from models.inference.run import check, measure, take_ranks, time_parts
from models.inference.source import Source
from models.machine import check_machine, resolve_device, resolve_dtype
from models.trained_weights import read_about


def infer(
    source: Source,
    config_path: Path,
    *,
    verify: bool,
    accuracy: bool,
    profile: bool,
    output: Path | None,
    forms: Sequence[Form],
    results: Path,
    kept: list[str],
) -> bool:
    """Measure and report one run, on several ranks by rank 0; False if the output differs from the reference.

    Args:
        verify: compare the predictions with the reference backend.
        accuracy: compare the predictions with the model in float32.
        profile: time each part of the model, and save a trace.
        output: file of the predictions.
        forms: its content.
        results: CSV to append to.
        kept: gets the file of predictions once it is written.
    """
    config, meta = source.config, source.loaded.meta
    check_forms(forms, source.loaded)
    if surrogate := surrogate_line(meta, config.data.source):
        console.print(surrogate)
    console.print(describe_config(f"{config_path} ({config.sha()})", config, hidden="training"))
    with memory_for("running the model", config), torch.inference_mode():
        run = measure(source)
        if output and run.logits is not None:
            save_predictions(output, run.logits, source.rows, forms)
            kept.append(f"the predictions in {output}")
            console.print(Text(f"predictions  {run.logits.shape[0]:,} x {run.logits.shape[1]} in {output}"))
        if profile:
            run.regions = time_parts(run.execution, config.runtime.repeats, source.device)
        check(run, verify=verify, accuracy=accuracy)
    memory = take_ranks(run)
    if run.logits is None:
        return True
    console.print(report_table(run, str(config_path)))
    if table := source.ranks_table(memory):
        console.print(table)
    if profile:
        report_profile(run, results.parent / "traces")
    write_results(run, config_path, results)
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
    if config.model.checkpoint not in (None, "auto"):
        read_about(Path(config.model.checkpoint))  # a missing file is found before a long load
    name, batches = config.data.name, config.data.batches
    errors.print(Text(f"loading {name}"))
    with memory_for(f"loading {name}", config):
        loaded = data.load(**config.load_arguments())
    if batches == 1:
        return Source(config, device, loaded)
    if loaded.meta.num_graphs == 1:
        raise ValueError(f"data.batches = {batches!r}: {loaded.meta.origin} holds one graph; only 1 is allowed")
    from models.inference.batches import AllBatches  # on use: of collections alone

    return AllBatches(config, device, loaded)
