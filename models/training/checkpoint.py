"""The state of a run: everything a resumed run needs to compute the same bits."""

import io
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_jsonable_python
from torch import Tensor

from configs import Config
from data import GraphMeta
from data.atomic import replacing
from models import GraphModel
from models.metrics import is_better
from models.torch_files import read_torch_file
from models.training.errors import TrainingError
from models.training.step import Step

VERSION = 4


@dataclass
class Best:
    """The best epoch so far, by validation metric and then by the lower validation loss."""

    epoch: int
    metric: float
    loss: float
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, model: GraphModel, epoch: int, metric: float, loss: float) -> "Best":
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        return cls(epoch, metric, loss, weights)

    def is_beaten_by(self, name: str, metric: float, loss: float) -> bool:
        """Whether an epoch with this value of the metric `name` is better."""
        return is_better(name, metric, self.metric) or (metric == self.metric and loss < self.loss)


def identity(config: Config, meta: GraphMeta, seed: int) -> dict[str, Any]:
    """Values, by key, that must agree between a run and its checkpoint."""
    sections = config.model_dump(mode="json")
    keys = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    others = {"runtime.seed", "runtime.device", "training.seeds", "training.checkpoint_seconds", "training.patience"}
    if meta.source != "file":  # whose labels may be others in another place: the hash is that of the edges
        others.add("data.root")
    kept = {key: value for key, value in keys.items() if key not in others}
    return kept | {"seed": seed, "data": f"{meta.name} {meta.source} {meta.sha256}"}


def _differing(run: dict[str, Any], of: dict[str, Any]) -> list[str]:
    """Keys on which a run and its state do not agree. A state may be older than a key, and so have its default; at a
    constant rate a run may get more epochs."""
    for key in run.keys() - of.keys():
        section, _, name = key.partition(".")
        of[key] = to_jsonable_python(Config.model_fields[section].annotation.model_fields[name].default)
    longer = run["training.schedule"] == "constant" and run["training.epochs"] >= of["training.epochs"]
    return [key for key in run if run[key] != of[key] and not (longer and key == "training.epochs")]


def save_state(path: Path, step: Step, best: Best, epoch: int, run: dict[str, Any]) -> None:
    """Write the state after `epoch` epochs."""
    on_gpu = step.device.type == "cuda"
    state = {
        "version": VERSION,
        "run": run,
        "epoch": epoch,
        "model": step.model.state_dict(),
        "average": step.averages.model.state_dict() if step.averages else None,
        "dropout_seeds": getattr(step.model, "dropout_seeds", None),
        "optimiser": step.optimiser.state_dict(),
        "scaler": step.scaler.state_dict(),
        "random": torch.get_rng_state(),
        "random_gpu": torch.cuda.get_rng_state(step.device) if on_gpu else None,
        "best": vars(best),
    }
    content = io.BytesIO()  # into a file, torch raises a RuntimeError for a full disk
    torch.save(state, content)
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.getbuffer())


def load_state(path: Path, step: Step, run: dict[str, Any]) -> tuple[Best, int]:
    """Restore a run, of whatever device. Returns the best epoch and the number of epochs done.

    Raises:
        TrainingError: the file is damaged or of another run; nothing was restored.
    """
    try:
        state = read_torch_file(path)
        version, of = int(state["version"]), dict(state["run"])
        other = _differing(run, of)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise TrainingError(f"{path}: cannot be read as the state of a run ({error}); use another --output") from error
    if version != VERSION:
        raise TrainingError(f"{path}: of version {version}, and this is {VERSION}; use another --output")
    if other:
        changed = "; ".join(f"{key} was {of[key]!r} and is {run[key]!r}" for key in other)
        changed += " (more are allowed with training.schedule=constant)" * ("training.epochs" in other)
        raise TrainingError(f"{path}: state of another run: {changed}. Use the same settings, or another --output")
    try:
        return _restore(state, step, run["training.epochs"])
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise TrainingError(f"{path}: damaged ({type(error).__name__}: {error}); use another --output") from error


def _restore(state: dict[str, Any], step: Step, epochs: int) -> tuple[Best, int]:
    done, best = state["epoch"], Best(**state["best"])
    values = done, best.epoch, best.metric, best.loss
    are_numbers = [*map(type, values)] == [int, int, float, float] and isfinite(best.metric + best.loss)
    if not are_numbers or not 1 <= best.epoch <= done <= epochs:
        raise ValueError(f"epoch, best epoch, metric and loss are {values}")
    dropout_seeds = getattr(step.model, "dropout_seeds", None)
    expected = {
        "model": step.model.state_dict(),
        "average": step.averages.model.state_dict() if step.averages else None,
        "dropout_seeds": dropout_seeds,
        "scaler": step.scaler.state_dict(),
        "random": torch.get_rng_state(),
    }
    for key, value in expected.items():
        _check(key, state[key], value)
    _check("weights", best.weights, expected["model"])
    optimiser = _in_our_pieces(state["optimiser"], step.optimiser)
    best.weights = {name: tensor.to(step.device) for name, tensor in best.weights.items()}
    step.model.load_state_dict(state["model"])
    if step.averages:
        step.averages.model.load_state_dict(state["average"])
    if dropout_seeds is not None:
        dropout_seeds.copy_(state["dropout_seeds"])
    rates = [group["lr"] for group in step.optimiser.param_groups]
    step.optimiser.load_state_dict(optimiser)
    for group, rate in zip(step.optimiser.param_groups, rates, strict=True):
        group["lr"] = rate  # this process's tensor, see `set_learning_rate`
    step.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"])
    if state["random_gpu"] is not None and step.device.type == "cuda":
        torch.cuda.set_rng_state(state["random_gpu"], step.device)
    return best, done


def _in_our_pieces(saved: dict[str, Any], optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """A state dict with the moments of a saved one, which another device divided otherwise (`WeightVector.pieces`)."""
    ours = optimiser.state_dict()
    moments: dict[int, dict[str, Any]] = {}
    for theirs, group, pieces in zip(saved["param_groups"], ours["param_groups"], optimiser.param_groups, strict=True):
        found = [saved["state"].get(nth, {}) for nth in theirs["params"]]
        sizes = [len(piece) for piece in pieces["params"]]
        for key, first in found[0].items():
            parts: Any = [first] * len(sizes)
            if isinstance(first, Tensor) and first.dim():
                whole = torch.cat([moment[key] for moment in found])
                _check(key, whole, torch.empty(sum(sizes)))
                parts = whole.split(sizes)
            for nth, part in zip(group["params"], parts, strict=True):
                moments.setdefault(nth, {})[key] = part
    return ours | {"state": moments}


def _check(name: str, found: Any, expected: Any) -> None:
    """Raise a ValueError unless a value has the keys, types and shapes of the expected one."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        same = all(getattr(found, key) == getattr(expected, key) for key in ("shape", "dtype", "layout"))
    elif isinstance(found, dict) and isinstance(expected, dict):
        same = found.keys() == expected.keys()
        for key in expected if same else ():
            _check(key, found[key], expected[key])
    else:
        same = type(found) is type(expected) and (not isinstance(found, list) or len(found) == len(expected))
        for one, other in zip(found, expected, strict=True) if same and isinstance(found, list) else ():
            _check(name, one, other)
    if not same:
        raise ValueError(f"{name} is {str(found)[:100]}")
