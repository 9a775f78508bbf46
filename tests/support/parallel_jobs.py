"""Jobs of the ranks in tests/parallel, and a backend with log-sum-exp and a backward pass of its own on the CPU."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.tensorboard
from gradient_cases import GradientCase, both_passes
from poison import poisoned_buffers
from scripts_as_modules import load_script
from typer.testing import CliRunner

from bench.baselines import REGISTRY
from common.launch import RankError
from configs import Config, TrainConfig
from data import LoadedGraph
from data.dgl import import_dgl
from fused3s.backends.base import Gradients
from fused3s.backends.cuda import refuse_gradients
from fused3s.backends.reference import ReferenceBackend
from fused3s.runtime.cuda_graph import CaptureError, capture
from fused3s.terms.dropout import Dropout
from models import GraphTransformer
from models.training import EpochRecord, TrainingError, TrainResult
from parallel import (
    Group,
    Part,
    check_agreement,
    gather_rows,
    on_first_rank,
    plan_part_attention,
    ranks,
    scatter,
)
from parallel import group as group_module
from parallel.attention import PartAttention
from parallel.capture import capture_together
from parallel.collectives import gather_uneven, sum_in_rank_order
from parallel.datasets import open_part, prepare_part
from parallel.passes import SplitPasses
from parallel.training import RankTrainer
from tests.cuda_shim.cuda_on_cpu import MODES, cuda_on_cpu

# Imported here, once for all ranks: tensorboard and DGL take seconds.
import_dgl()


class SplitBackend(ReferenceBackend):
    """As `fused3s`, whose backward pass takes output and log-sum-exp from outside, in float64."""

    name = "split"
    autograd = False
    has_backward = True
    traceable = False

    def attend(self, data, call):
        refuse_gradients(self.name, *call[:3])
        return super().attend(data, call)

    def attend_backward(self, data, given):
        call, output, grad_output, wanted, _, grad_lse = given
        assert grad_lse is None
        dropout = None if call.edges is None else call.edges.dropout
        case = GradientCase(data.row, data.col, *call[:3], grad_output, output, call.lse, call.scale, dropout)
        found = zip(("query", "key", "value"), both_passes(case, torch.float64, torch.float64), strict=True)
        return Gradients(**{name: each.to(call.query.dtype) for name, each in found if name in wanted})


def register_backends() -> None:
    REGISTRY["split"] = SplitBackend()


def plan_part(part: Part, group: Group, backend: str, query: torch.Tensor) -> PartAttention:
    """Both passes over a part, for queries [n, H, d]."""
    shape = {"dtype": query.dtype, "head_dim": query.shape[2], "num_heads": query.shape[1]}
    return plan_part_attention(part, group, backend=backend, **shape, backward=True)


def attend(
    group: Group,
    cases: list[tuple[list[Part], list[torch.Tensor], torch.Tensor]],
    backend: str,
    options: dict[str, Any],
) -> list[list[torch.Tensor]]:
    """For each case (parts, [q, k, v] of all rows, gradient of the output): rows of this rank, output, gradients."""
    found = []
    for parts, tensors, grad_output in cases:
        part = parts[group.rank]
        rows = torch.from_numpy(part.rows)
        q, k, v = (tensor[rows].to(group.device).requires_grad_() for tensor in tensors)
        attention = plan_part(part, group, backend, q)
        assert attention.backend == backend
        assert isinstance(attention.passes, SplitPasses) == (backend in ("split", "fused3s"))
        output = attention(q, k, v, **options)
        gradients = torch.autograd.grad(output, [q, k, v], grad_output[rows].to(output))
        with torch.no_grad():
            assert torch.equal(attention(q, k, v, **options), output)
            if group.backend == "nccl" and min(part.partition.rows):  # a rank without rows queues nothing
                call = partial(attention, q, k, v, **options)
                captured = capture_together(partial(capture, call, group.device), group)
                captured.result.fill_(torch.nan)
                assert torch.equal(captured.replay(), output)
        found.append([rows, output.detach().cpu(), *(gradient.cpu() for gradient in gradients)])
    return found


def attend_by_fused3s(group: Group, cases: list[Any], options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """As `attend`, by the CUDA kernels of fused3s on the CPU (tests/cuda_shim)."""
    with cuda_on_cpu(MODES["late"]), pytest.MonkeyPatch.context() as patch, poisoned_buffers(patch):
        return attend(group, cases, "fused3s", options)


def attend_on_gpus(rank: int, cases: list[Any]) -> list[list[torch.Tensor]]:
    """As `attend`, by fused3s; ranks that have no GPU of their own share one."""
    with ranks("cuda") as group:
        return attend(group, cases, "fused3s", {})


def loss_along(
    group: Group,
    parts: list[Part],
    backend: str,
    tensors: list[torch.Tensor],
    directions: list[torch.Tensor],
    grad_output: torch.Tensor,
    step: float,
) -> list[float]:
    """This rank's part of <grad_output, output> with dropout: at `tensors` moved by -step and by +step along
    `directions`, and its derivative along them by the gradients."""
    part = parts[group.rank]
    rows = torch.from_numpy(part.rows)
    attention = plan_part(part, group, backend, tensors[0])

    def loss(moved: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
        pairs = zip(tensors, directions, strict=True)
        leaves = [(tensor + moved * direction)[rows].requires_grad_() for tensor, direction in pairs]
        return (attention(*leaves, dropout=Dropout(0.4, 5)) * grad_output[rows]).sum(), leaves

    middle, leaves = loss(0.0)
    gradients = torch.autograd.grad(middle, leaves)
    slope = sum((grad * along[rows]).sum() for grad, along in zip(gradients, directions, strict=True))
    with torch.no_grad():
        return [loss(-step)[0].item(), loss(step)[0].item(), float(slope)]


def gather(group: Group, parts: list[Part], columns: int) -> torch.Tensor | None:
    """What `gather_rows` gives rank 0 of rows that hold their number in the graph."""
    part = parts[group.rank]
    rows = torch.from_numpy(part.rows)[:, None].expand(-1, columns).contiguous()
    return gather_rows(part, rows, group)


def scattered(group: Group, values: list[Any]) -> Any:
    """What `scatter` gives each rank of the values of rank 0."""
    return scatter(group, values if group.is_first else None)


def open_data(group: Group, config: Config) -> tuple[Part, LoadedGraph, LoadedGraph | None]:
    return open_part(config, group, lambda text: None)


def collect(group: Group, tensors: list[list[torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`gather_uneven` of the first tensor of this rank, and the others after `sum_in_rank_order`."""
    first, *others = tensors[group.rank]
    sum_in_rank_order(others, group)
    return gather_uneven(first, group), others


def fail_first(rank: int) -> str:
    """The error of a rank that waits for the work of rank 0, which fails."""
    try:
        with ranks("cpu", timeout=60) as group:
            on_first_rank(group, lambda: 1 // 0)
    except (RankError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_script(rank: int, name: str, arguments: list[list[str]]) -> tuple[int, str]:
    """Exit status and output of a script in this process, with the arguments of this rank."""
    done = CliRunner().invoke(load_script(name).app, arguments[rank])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def run_model(
    group: Group,
    parts: list[Part],
    options: dict[str, Any],
    weights: dict[str, torch.Tensor],
    features: torch.Tensor,
    labels: torch.Tensor,
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """Logits of the Graph Transformer in the graph's order, and the gradients of its weights for the sum of the losses
    of all rows."""
    part = parts[group.rank]
    model = GraphTransformer(**options).double()
    model.load_state_dict(weights)
    attention = plan_part(part, group, "split", torch.empty(0, options["heads"], model.head_dim, dtype=torch.float64))
    rows = torch.from_numpy(part.rows)
    logits = model(prepare_part(model, features[rows], attention))
    torch.nn.functional.cross_entropy(logits, labels[rows], reduction="sum").backward()
    parameters = dict(model.named_parameters())
    sum_in_rank_order([parameter.grad for parameter in parameters.values()], group)
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return gather_rows(part, logits.detach(), group), gradients


def trainer_of(group: Group, settings: dict[str, Any], folder: str, **options: Any) -> RankTrainer:
    config = TrainConfig.model_validate(settings)
    part, loaded, _ = open_data(group, config)
    return RankTrainer(group, part, config, loaded, Path(folder), seed=0, **options)


def train(
    group: Group, settings: dict[str, Any], folder: str, resume: bool = False
) -> tuple[list[EpochRecord], TrainResult | None, dict[str, torch.Tensor]]:
    """Epochs, result and weights of a run of `scripts/train.py`."""
    trainer = trainer_of(group, settings, folder, resume=resume)
    records = list(trainer.run())
    return records, trainer.result, trainer.step.model.state_dict()


class CalledAgain:
    """In place of a captured step on the CPU, whose replays are further calls. A rank of FAILING cannot capture."""

    FAILING: tuple[int, ...] = ()

    def __init__(self, run: Callable[[], torch.Tensor], *states: Any, shares: None) -> None:
        if dist.get_rank() in self.FAILING:
            raise CaptureError("it waits for the GPU")
        self.replay = run


def train_captured(
    group: Group, settings: dict[str, Any], folder: str, failing: tuple[int, ...]
) -> tuple[list[EpochRecord], TrainResult | None, dict[str, torch.Tensor], str, int]:
    """As `train`, with a captured step; also the reason, and the number of graphs that the group must free."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.training.step.capture_step", CalledAgain)
        patch.setattr(CalledAgain, "FAILING", failing)
        patch.setattr(RankTrainer, "_capture_refused", lambda trainer: None)
        trainer = trainer_of(group, settings, folder)
        records = list(trainer.run())
        return records, trainer.result, trainer.step.model.state_dict(), trainer.graph_reason, len(group.graphs)


def train_until(group: Group, settings: dict[str, Any], folder: str, epochs: int) -> int:
    """Train until the last rank asks for a stop in epoch `epochs`; the epochs that this rank trained."""
    trainer = trainer_of(group, settings, folder)
    is_last = group.rank == group.size - 1
    trainer.stop = is_last and epochs == 1
    for count, _ in enumerate(trainer.run(), 2):
        trainer.stop |= is_last and count == epochs
    return trainer.done


def train_on_gpus(
    rank: int, settings: dict[str, Any], folder: str
) -> tuple[list[EpochRecord], TrainResult | None, dict[str, torch.Tensor]]:
    """As `train`, on GPUs."""
    with ranks("cuda") as group:
        records, result, weights = train(group, settings, folder)
        return records, result, {name: weight.cpu() for name, weight in weights.items()}


def error_of_training(group: Group, settings: dict[str, Any], folder: str) -> str:
    try:
        train(group, settings, folder)
    except (ValueError, TrainingError) as error:
        return str(error)
    return ""


def end_early(rank: int, how: str, who: int, device: str = "cpu") -> tuple[str, float]:
    """Rank `who` ends while the others wait for it, rank 1 a little later; the error of this rank and its seconds."""
    group_module.REASON_TIMEOUT = 0.5
    start = time.monotonic()
    if how == "killed at the meeting":
        os.environ["WORLD_SIZE"] = "4"  # one that does not come
        if rank == who:
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGKILL]).start()
    try:
        with ranks(device, timeout=60) as group:
            dist.barrier()
            if rank == who and how in ("killed", "killed before a broadcast"):
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == who and how == "raises":
                raise ValueError("the features hold a NaN")
            if how == "killed before a broadcast":  # rank 0 alone meets the killed one
                on_first_rank(group, lambda: None)
            time.sleep(1.5 * (rank == 1))
            tensor = torch.ones(3, device=group.device)
            sum_in_rank_order([tensor], group)
            tensor.cpu()  # waits for NCCL
    except (RankError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def end_late(rank: int, is_killed: bool, folder: Path) -> str:
    """Rank 1 is the last to leave; or rank 2 is killed, and the others, as over NCCL, do not notice for a minute."""
    group_module.WATCHED, group_module.GRACE = ("gloo",), 0.5
    sys.stderr = (folder / f"{rank}.txt").open("w")
    with ranks("cpu", timeout=60) as group:
        dist.barrier()
        if rank == 2 and is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_killed or rank == 1:
            time.sleep(60 if is_killed else 2)
    return f"{group.rank} left"


def meet(rank: int, seconds: float, variables: list[dict[str, str]]) -> str:
    """The error of a rank whose group never becomes complete."""
    os.environ.update(variables[rank])
    group_module.MEETING_TIMEOUT = seconds
    try:
        with ranks("cpu"):
            return ""
    except RankError as error:
        return str(error)


def agree(group: Group, values: list[dict[str, str]]) -> str:
    try:
        check_agreement(group, values[group.rank])
    except RankError as error:
        return str(error)
    return ""
