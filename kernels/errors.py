"""Errors and warnings that a caller can act on. Wrong arguments are plain ValueError and TypeError."""


class BackendUnavailableError(RuntimeError):
    """The attention backend cannot run here: no GPU, a GPU too old, a package missing. The text is the reason."""


class KernelCompileError(RuntimeError):
    """NVRTC refused a kernel. The text holds the instance, the compiler's log and where the source was saved."""


class UnsupportedGraphError(ValueError):
    """The backend runs here and takes the inputs, but not this graph; the text says what the graph would need."""


class SlowerBackendWarning(UserWarning):
    """On a GPU backend "auto" has to leave `fused3s` for a slower one. The text says why; once a process and reason."""
