"""Detects changes of modules after copies of their weights were made."""

from torch import nn


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
