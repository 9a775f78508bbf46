"""Errors and warnings that a caller can act on. Wrong arguments are plain ValueError and TypeError."""


class BackendUnavailableError(RuntimeError):
    """The attention backend cannot run here: no GPU, a GPU too old, a package missing. The text is the reason."""


class KernelCompileError(RuntimeError):
    """NVRTC refused a kernel. The text names the instance, the compiler's log and the saved source."""


class UnsupportedGraphError(ValueError):
    """The backend cannot run this graph, although it runs here and takes the inputs; the text gives the reason."""


class SlowerBackendWarning(UserWarning):
    """On a GPU, "auto" chose a slower backend than `fused3s`, or a layer computes a part in plain PyTorch. The text is
    the reason; once per process and reason."""
