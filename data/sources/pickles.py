"""Published pickles, read without running their code: arrays, tensors and plain containers."""

import io
import pickle
from typing import IO, Any

# Names by package; old and new versions of NumPy, SciPy and torch have them in different modules.
ALLOWED = {
    "numpy": {"_reconstruct", "_frombuffer", "ndarray", "dtype", "scalar"},
    "scipy": {"csr_matrix"},
    "torch": {"_rebuild_tensor", "_rebuild_tensor_v2"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"list", "dict", "set", "int", "float"},
    "_codecs": {"encode"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        package = module.partition(".")[0].replace("__builtin__", "builtins")
        if name not in ALLOWED.get(package, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code and is not read")
        return super().find_class(module, name)


def load(file: IO[bytes], **options: Any) -> Any:
    """As `pickle.load`.

    Raises:
        pickle.UnpicklingError: the file is damaged, or names something else than arrays and containers.
    """
    return _Unpickler(file, **options).load()


def _storage(content: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)
