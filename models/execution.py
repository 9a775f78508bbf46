"""Execution of a forward pass: implementation of the non-attention layers, eager or as a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fused3s.runtime.cuda_graph import CapturedGraph, CaptureError, capture
from models.fast import DensePath, Forward, choose_path, inference_forward
from models.graph_inputs import Attention, GraphInputs
from models.graph_model import GraphModel

Capture = Callable[[Callable[[], Tensor], torch.device], CapturedGraph[Tensor]]


class CudaGraphError(RuntimeError):
    """A forward pass cannot be captured in a CUDA graph; the text names the attention backend and the reason."""


class StaleWeightsError(RuntimeError):
    """The weights changed after the fused or compiled path copied them; a run would mix old and new weights."""


class CopiedModules:
    """Detects in-place operations that torch counts, `load_state_dict` with and without assign=True, `.data = other`,
    casts and moves, and replaced parameters or modules.

    Writes through `.data` (`p.data.mul_(2)`), NumPy or the storage go unnoticed, since torch does not count them; so do
    in-place operations on weights made in inference mode.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._places, self._weights = [], []
        for module in (inner for outer in modules for inner in outer.modules()):
            for places in (module._modules, module._parameters):
                self._places += [(places, name, found) for name, found in places.items()]
            for weight in module.parameters(recurse=False):
                version = None if weight.is_inference() else weight._version
                # The alias keeps the memory, so that no other weight can get its address.
                self._weights.append((weight, weight.detach(), weight.data_ptr(), version))

    def have_changed(self) -> bool:
        return any(places.get(name) is not found for places, name, found in self._places) or any(
            weight.data_ptr() != address or (version is not None and weight._version != version)
            for weight, _, address, version in self._weights
        )


@dataclass(frozen=True, eq=False)
class Execution:
    """A model on one graph, ready to run.

    Attributes:
        inputs: inputs of an eager pass.
        path: implementation of the non-attention layers: plain, compiled or fused (`models.fast`).
        path_reason: why it was chosen.
        forward: inputs -> logits by that path.
        copied: modules whose weights `forward` has copied.
        captured: the CUDA graph; None for eager execution. Replays read the tensors of `inputs` again (copy other
            features there), or call the function that makes inputs again.
        graph_reason: why there is a CUDA graph, or why not.
    """

    model: GraphModel
    inputs: GraphInputs
    path: DensePath
    path_reason: str
    forward: Forward
    copied: CopiedModules
    captured: CapturedGraph[Tensor] | None = None
    graph_reason: str = "as configured"

    def run(self) -> Tensor:
        """Logits. A CUDA graph writes them to one buffer, which the next run overwrites.

        Raises:
            StaleWeightsError: the weights changed after the compiled or the fused path copied them.
        """
        if not self.captured:
            return self.eager()
        self.check_weights()
        return self.captured.replay()

    def eager(self, attention: Attention | None = None) -> Tensor:
        """Logits of an eager pass; `attention` replaces the attention of the inputs."""
        self.check_weights()
        return self.forward(self.inputs if attention is None else replace(self.inputs, attention=attention))

    def check_weights(self) -> None:
        """Raise a StaleWeightsError if a weight changed after it was copied (see `CopiedModules`)."""
        if self.copied.have_changed():
            raise StaleWeightsError(
                f"the model's weights changed after the {self.path} path copied them: "
                "call prepare_execution again after loading or updating weights"
            )


def prepare_execution(
    model: GraphModel,
    inputs: GraphInputs | Callable[[], GraphInputs],
    *,
    backend: str,
    dense: Literal["auto"] | DensePath = "auto",
    cuda_graph: bool | Literal["auto"] = "auto",
    capture: Capture = capture,
) -> Execution:
    """Choose the implementation, and capture a CUDA graph if configured.

    Call it under `torch.inference_mode()`, and again after loading other weights.

    Args:
        model: on the device of the inputs.
        inputs: from `model.prepare`; or a function that makes them, which is then captured, too.
        backend: name of the attention backend, for messages.
        dense: see `models.fast`.
        cuda_graph: whether to capture the pass; "auto": if possible.
        capture: captures a function on a GPU; on several ranks all of them, or none.

    Raises:
        DenseUnavailableError, CudaGraphError: the requested execution is not available; the text is the reason.
    """
    path, reason = choose_path(model, dense)
    forward, copied = inference_forward(model, path)
    make = inputs if callable(inputs) else lambda: inputs
    eager = Execution(model, make(), path, reason, forward, CopiedModules(*copied))
    if cuda_graph is False:
        return eager
    asked = "chosen by auto" if cuda_graph == "auto" else "as configured"
    try:
        if model.device.type != "cuda":
            raise CudaGraphError(f"a CUDA graph needs an NVIDIA GPU, and the model is on {model.device}")
        try:
            captured = capture(lambda: forward(make()), model.device)
        except CaptureError as error:
            raise CudaGraphError(
                f"a forward pass with the attention backend {backend} cannot be captured in a CUDA graph: {error}"
            ) from error
    except CudaGraphError as error:
        if cuda_graph is True:
            raise
        return replace(eager, graph_reason=f"{asked}; {error}")
    return replace(eager, captured=captured, graph_reason=asked)
