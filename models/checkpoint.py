"""Load weights from a .safetensors file, or from one made with `torch.save(model.state_dict(), path)`."""

from pathlib import Path

from torch import Tensor, nn

from models.torch_files import read_torch_file

_SHOWN = 4  # tensors listed per kind of difference, since one wrong setting affects all blocks


class CheckpointError(ValueError):
    """A checkpoint file is missing, damaged or of another model. The text names the differences."""


def load_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Copy a state dict from `path` into `model`, converted to the model's device and dtype.

    Raises:
        CheckpointError: nothing was copied; the text lists missing and unknown tensors and other shapes.
    """
    weights = _read(Path(path))
    expected = model.state_dict()
    differences = {
        "of another shape": [
            f"{name} {list(weights[name].shape)}, the model has {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in weights and weights[name].shape != tensor.shape
        ],
        "missing": [f"{name} {list(tensor.shape)}" for name, tensor in expected.items() if name not in weights],
        "unknown": [name for name in weights if name not in expected],
    }
    if any(differences.values()):
        settings = "model.dim, heads, blocks, norm, pos_enc, random_walk, virtual_node and edge_features"
        lines = [f"{path}: not a checkpoint of this model; do {settings} agree?"]
        for kind, found in differences.items():
            lines += [f"  {kind}: {tensor}" for tensor in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  {kind}: {len(found) - _SHOWN} more")
        raise CheckpointError("\n".join(lines))
    model.load_state_dict(weights)


def _read(path: Path) -> dict[str, Tensor]:
    """The state dict of a file."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        weights = read_torch_file(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path}: not a state dict; save one with torch.save(model.state_dict(), path)")
    return weights


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors; is it truncated? ({error})") from error
