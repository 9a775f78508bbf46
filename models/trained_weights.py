"""Trained weights as safetensors, with a record of the training run.

The record is in the header of the file, so that it cannot be separated from the weights, and is repeated in a JSON file
of the same name.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from configs import Config
from data import GraphMeta
from data.atomic import replacing
from models import CheckpointError, GraphModel, load_checkpoint
from models.checkpoint import CHECKSUM, read_safetensors, safetensors_bytes
from models.metrics import METRICS, shown

# Keys of `model` that shape the weights.
ARCHITECTURE = ("kind", "dim", "heads", "out_heads", "blocks", "norm", "pos_enc", "random_walk", "edge_features")
HEADER_KEY = "about"
ROOT = Path(__file__).resolve().parents[1]  # of the clone
SHIPPED = ROOT / "results" / "checkpoints"


@dataclass(frozen=True)
class TrainedWeights:
    """The training run of a set of weights.

    Attributes:
        data, data_sha256, data_source: data set, hash of its edges and its source (see `data.GraphMeta`).
        graphs: number of graphs of the data set.
        metric: a name of `models.metrics.METRICS`.
        valid, test: metric on these splits; test is None before the end of the run.
        unit: of the metric and of the model's outputs; "" for none.
        epoch: epoch of the weights, the one with the best validation metric.
        config_sha, config: the resolved configuration.
    """

    data: str
    data_sha256: str
    data_source: str
    graphs: int
    metric: str
    valid: float
    test: float | None
    epoch: int
    seed: int
    config_sha: str
    config: dict[str, Any]
    torch: str = torch.__version__
    unit: str = ""

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)  # when it is read


def save_weights(path: Path, weights: Mapping[str, Tensor], about: TrainedWeights) -> None:
    """Write `path` (.safetensors) and its JSON file."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(safetensors_bytes(weights, {HEADER_KEY: json.dumps(asdict(about))}))
    with replacing(path.with_suffix(".json")) as unfinished:
        unfinished.write_text(json.dumps(asdict(about), indent=2) + "\n", encoding="utf-8")


def load_weights(model: GraphModel, path: Path, config: Config, meta: GraphMeta) -> TrainedWeights | None:
    """Load a checkpoint that matches the configuration and the data. Returns its record, or None if it has none.

    Raises:
        CheckpointError: the file is missing, damaged, or of another model or data set; nothing was loaded.
    """
    about = read_about(path)
    if about and (wrong := differences(about, config, meta)):
        raise CheckpointError(f"{path}: {wrong}")
    load_checkpoint(model, path)
    return about


def find_weights(config: Config, meta: GraphMeta) -> tuple[Path | None, str]:
    """The file of the weights that model.checkpoint names, None for random ones, and a line about them.

    "auto": weights in results/checkpoints that match model and graph.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    asked = config.model.checkpoint
    if asked is None:
        return None, "random (as configured)"
    if asked != "auto":
        return Path(asked), _described(asked, "as configured", read_about(Path(asked)))
    found = [(path, about) for path in sorted(SHIPPED.glob("*.safetensors")) if (about := read_about(path))]
    for path, about in found:
        if differences(about, config, meta) is None:
            return path, _described(weights_name(path), "chosen by auto", about)
    which = "are of another model or graph" if any(about.data == meta.name for _, about in found) else "do not exist"
    return None, f"random (chosen by auto; weights for {meta.name} in {SHIPPED.relative_to(ROOT)} {which})"


def weights_name(path: Path | None) -> str:
    """The name of weights in results; "none" for random ones."""
    if path is None:
        return "none"
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(SHIPPED) else str(path)


def _described(name: str, reason: str, about: TrainedWeights | None) -> str:
    if about is None:
        return f"{name} ({reason})"
    found = f"{METRICS[about.metric]} {shown(about.metric, about.valid, about.unit)} (validation)"
    if about.test is not None:
        found += f", {shown(about.metric, about.test, about.unit)} (test)"
    return f"{name} ({reason}): {about.data}, epoch {about.epoch}, {found} when trained"


def read_about(path: Path) -> TrainedWeights | None:
    """The record in a safetensors file; None if there is none.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; weights are a file that scripts/train.py has written")
    if path.suffix != ".safetensors":
        return None
    _, texts = read_safetensors(path)
    if (text := texts.get(HEADER_KEY)) is None:
        return None
    if CHECKSUM not in texts:
        raise CheckpointError(f"{path}: lacks a checksum: damaged, or of an earlier version; train again")
    try:
        about = TypeAdapter(TrainedWeights).validate_json(text)
        about.config["model"] = {"random_walk": 0} | about.config["model"]  # which the first records lack
        for section, key in (("model", "virtual_node"), ("runtime", "partition")):  # of earlier records
            about.config.get(section, {}).pop(key, None)
        if about.metric not in METRICS or not {*ARCHITECTURE} <= about.config["model"].keys():
            raise ValueError(f"metric {about.metric}, model {about.config['model']}")
        return about
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its record of the training run is of another version ({error})") from error


def differences(about: TrainedWeights, config: Config, meta: GraphMeta) -> str | None:
    """Why weights do not match a configuration and a graph, and what to set; None if they match."""
    trained, asked = about.config["model"], config.model.model_dump(mode="json")
    other = [key for key in ARCHITECTURE if trained[key] != asked[key]]
    if other:
        settings = ", ".join(f"model.{key} = {trained[key]!r} (here {asked[key]!r})" for key in other)
        remedy = " ".join(f"--set model.{key}={trained[key]}" for key in other)
        return f"weights of another model: trained with {settings}; use {remedy}, or other weights"
    if about.data != meta.name:
        return (
            f"weights of another data set: trained on {about.data}, and this is {meta.name}; use "
            f"--set data.name={about.data}, or other weights (model.checkpoint=null for random ones)"
        )
    # A batch has other edges than the collection that the model was trained on.
    if about.graphs == meta.num_graphs and about.data_sha256 != meta.sha256:
        return (
            f"weights of another version of {meta.name}: trained on {about.data_source} data of hash "
            f"{about.data_sha256}, and this is {meta.source} data of hash {meta.sha256}; use --set "
            f"data.source={about.data_source}, or other weights (model.checkpoint=null for random ones)"
        )
    return None
