"""All private names of torch that the library uses, in one place.

Each name is bound once, at import. If a public function does the same, more slowly, it is the fallback; without one, a
torch that lacks the name is an ImportError.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module
from torch.utils import _python_dispatch


def needed(owner: Any, name: str) -> Any:
    """A private name of torch.

    Raises:
        ImportError: this torch lacks it.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        raise ImportError(
            f"torch {torch.__version__}: has no {owner.__name__}.{name}, which this library needs; "
            "use torch 2.6 to 2.15"
        ) from None


# In-place operations on lists of tensors, by few kernels.
foreach_copy_, foreach_lerp_ = needed(torch, "_foreach_copy_"), needed(torch, "_foreach_lerp_")


def _stream_handle(device_index: int) -> int:
    return torch.cuda.current_stream(device_index).cuda_stream


# Ends the CUDA context if a bool on the GPU is false, without a wait; in a CUDA graph too.
assert_on_gpu = needed(torch, "_assert_async")

# Handle of the current stream of a GPU, without creating a Stream object as `torch.cuda.current_stream` does.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_handle)

# Index of the current GPU, without the check of `torch.cuda.current_device` that CUDA is initialised.
current_device_index = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

# Whether a torch.func transform is active.
functorch_active = needed(torch._C, "_are_functorch_transforms_active")

# Number of active torch dispatch modes, such as a FakeTensorMode and make_fx.
dispatch_modes = needed(torch._C, "_len_torch_dispatch_stack")

# The base class of such modes.
DispatchMode = needed(_python_dispatch, "TorchDispatchMode")


def _any_global_hook() -> bool:
    return any(
        getattr(nn_module, f"_global_{which}_hooks") for which in ("backward_pre", "backward", "forward_pre", "forward")
    )


# Whether a hook of all modules is registered; torch before 2.7 has no function for it.
has_global_hooks = getattr(nn_module, "_has_any_global_hook", _any_global_hook)

needed(forward_ad, "_current_level")  # -1 outside of `dual_level`; it changes, so that it is read at each call


def is_transformed() -> bool:
    """Whether forward mode or a torch.func transform is active; an autograd function then needs more methods."""
    return forward_ad._current_level >= 0 or functorch_active()


def is_traced(tensor: Tensor) -> bool:
    """Whether operations on the tensor are recorded, or give shapes alone: by torch.compile and torch.export, with fake
    tensors, and on device meta."""
    return torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor)


def compiles_cuda_graphs() -> bool:
    """While torch.compile traces: whether it compiles for CUDA graphs, as with mode="reduce-overhead". False for a
    torch that does not tell: its graphs leave out operators of the tag cudagraph_unsafe."""
    with suppress(ImportError, AttributeError):
        from torch._dynamo.symbolic_convert import InstructionTranslator

        backend = InstructionTranslator.current_tx().output.compiler_fn._torchdynamo_orig_backend
        return bool(backend.config.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))
    return False


_make_autograd = getattr(torch._library.autograd, "make_autograd_impl", None)
_below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
_any_requires_grad = getattr(torch._C, "_any_requires_grad", None)


def register_shortcut(
    library: torch.library.Library, operator: Any, run: Callable[..., Any], backward: Any, setup: Any
) -> None:
    """Let calls that autograd does not record (such as calls in compiled code) go directly to `run`: the dispatcher
    converts all arguments a second time on the way from autograd to the kernel, which takes half the time of a call.
    The other arguments are those of `register_autograd`, which must come before."""
    if None in (_make_autograd, _below_autograd, _any_requires_grad):
        return
    recorded = _make_autograd(operator, torch._library.autograd.Info(backward, setup))

    def call(keys: Any, *inputs: Any) -> Any:
        is_recorded = torch.is_grad_enabled() and _any_requires_grad(*inputs)
        if is_recorded or type(inputs[0]) is not Tensor or dispatch_modes() or is_transformed():
            return recorded(keys, *inputs)
        with _below_autograd():
            return run(*inputs)

    for key in ("AutogradCPU", "AutogradCUDA"):
        library.impl(operator._opname, call, key, with_keyset=True)


_AUTOGRAD_KEYS = [
    getattr(needed(torch._C, "DispatchKey"), name) for name in ("AutogradCPU", "AutogradCUDA", "AutogradFunctionality")
]
_included, _excluded = (needed(torch._C, f"_dispatch_tls_local_{which}_set") for which in ("include", "exclude"))
_force_keys = needed(torch._C, "_ForceDispatchKeyGuard")


@contextmanager
def autograd_active() -> Iterator[None]:
    """Enable autograd inside an operator's kernel, where the dispatcher disables it."""
    excluded = _excluded()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with _force_keys(_included(), excluded), torch.enable_grad():
        yield


# relu(bias + x @ weight) as one kernel of cuBLASLt.
_addmm_relu = getattr(torch, "_addmm_activation", None)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x weight^T + bias) of x [N, F] and weight [d, F]."""
    return F.relu(F.linear(x, weight, bias)) if _addmm_relu is None else _addmm_relu(bias, x, weight.t())


def abandon_pool(device_index: int, pool: tuple[int, int]) -> None:
    """Tell torch's allocator that a failed capture no longer allocates from its pool. If torch lacks these functions,
    the memory of the failed capture stays in use until the process ends."""
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device_index, pool)
        torch._C._cuda_releasePool(device_index, pool)


def default_store() -> Any:
    """The key-value store of torch.distributed's default group."""
    import torch.distributed.distributed_c10d as distributed  # not every torch has it

    return needed(distributed, "_get_default_store")()
