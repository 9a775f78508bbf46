"""Weights of a .safetensors file, or of one made with `torch.save(model.state_dict(), path)`."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from models.torch_files import read_torch_file

_SHOWN = 4  # tensors listed per kind of difference, since one wrong setting affects all blocks
CHECKSUM = "sha256"  # key in the header of a safetensors file
_NONE = {CHECKSUM: "0" * 64}


class CheckpointError(ValueError):
    """A checkpoint file is missing, damaged or of another model. The text names the differences."""


def load_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Copy a state dict from `path` into `model`, converted to the model's device and dtype.

    Raises:
        CheckpointError: nothing was copied; the text lists missing and unknown tensors, and other shapes and types.
    """
    weights = _read(Path(path))
    expected = model.state_dict()
    differences = {
        "of another shape": [
            f"{name} {list(weights[name].shape)}, the model has {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in weights and weights[name].shape != tensor.shape
        ],
        "of another type": [
            f"{name} {weights[name].dtype}, {weights[name].layout}, the model has {tensor.dtype}"
            for name, tensor in expected.items()
            if name in weights and not _can_become(weights[name], tensor)
        ],
        "missing": [f"{name} {list(tensor.shape)}" for name, tensor in expected.items() if name not in weights],
        "unknown": [name for name in weights if name not in expected],
    }
    if any(differences.values()):
        settings = "model.dim, heads, blocks, norm, pos_enc, random_walk and edge_features"
        lines = [f"{path}: not a checkpoint of this model; do {settings} agree?"]
        for kind, found in differences.items():
            lines += [f"  {kind}: {tensor}" for tensor in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  {kind}: {len(found) - _SHOWN} more")
        raise CheckpointError("\n".join(lines))
    model.load_state_dict(weights)


def _can_become(found: Tensor, wanted: Tensor) -> bool:
    """Whether a tensor has numbers of the wanted kind: floats in any precision, or integers."""
    is_float = found.dtype.is_floating_point == wanted.dtype.is_floating_point
    return (
        is_float and found.layout == torch.strided and not (found.is_meta or found.is_quantized or found.is_complex())
    )


def safetensors_bytes(weights: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """A safetensors file with texts about the weights, and a checksum of all its bytes in its header."""
    from safetensors.torch import save

    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, {**about, **_NONE})
    return content.replace(_entry(_NONE[CHECKSUM]), _entry(_digest(content)), 1)


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights of a safetensors file, and the texts about them. A checksum is verified if there is one.

    Raises:
        CheckpointError: the file is damaged.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load

    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
        content = path.read_bytes()
        weights = load(content)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors; is it truncated? ({error})") from error
    found = about.get(CHECKSUM)
    if found is not None and found != _digest(content.replace(_entry(found), _entry(_NONE[CHECKSUM]), 1)):
        raise CheckpointError(f"{path}: damaged, its checksum is wrong; copy it again, or use other weights")
    return weights, about


def _digest(content: bytes) -> str:
    """The checksum of a file, made while zeros stand in its place."""
    return hashlib.sha256(content).hexdigest()


def _entry(checksum: str) -> bytes:
    return f'"{CHECKSUM}":"{checksum}"'.encode()


def _read(path: Path) -> dict[str, Tensor]:
    """The state dict of a file."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; weights are a file that scripts/train.py has written")
    if path.suffix == ".safetensors":
        return read_safetensors(path)[0]
    try:
        weights = read_torch_file(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path}: not a state dict; save one with torch.save(model.state_dict(), path)")
    return weights
