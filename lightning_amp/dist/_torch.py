"""Names of torch outside its public interface that sharded tensors need, with the reason."""

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C import _dispatch_tls_local_exclude_set as excluded_keys
from torch._C import _dispatch_tls_local_include_set as included_keys

# runs operators with what a subclass of Tensor has in their place again
from torch._C import _EnableTorchFunction as enable_torch_function

# an operator reaches the subclass above autograd and autocast: their keys are put aside, and put back for the parts
from torch._C import _ForceDispatchKeyGuard as force_dispatch_keys

# a dispatch mode sees the operators on parts, not those on the whole
from torch._C import _len_torch_dispatch_stack as n_dispatch_modes

# whether a backward pass, which may be that of torch.autograd.grad, needs the gradient of a node
from torch._C import _will_engine_execute_node as is_reached

# torch.compiler.disable, which loads the compiler at the first call: a compiler that traces collectives with tensors
# that have no values would leave them out
from torch._compile import _disable_dynamo as never_compiled

# what `torch.autograd.Function.apply` unwraps its arguments by, whatever name it was taken under
from torch._functorch import utils as functorch_utils

# all overloads of one operator
from torch._ops import OpOverloadPacket as OpOverloadPacket

# shapes are found besides what counts the operators of a step
from torch.utils._python_dispatch import _disable_current_modes as no_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

from lightning_amp._torch import OpOverload

try:
    # a function of torch that is written in Python is run, and what it calls is looked up
    from torch._C import _skip_one_hop_torch_function as skip_one_torch_function
except ImportError:
    # before torch 2.13
    skip_one_torch_function = None  # type: ignore[assignment]

__all__ = [
    "AUTOGRAD_AND_AUTOCAST",
    "OpOverloadPacket",
    "enable_torch_function",
    "excluded_keys",
    "force_dispatch_keys",
    "functorch_utils",
    "in_backward",
    "included_keys",
    "is_composite",
    "is_reached",
    "n_dispatch_modes",
    "never_compiled",
    "no_modes",
    "pop_dispatch_mode",
    "push_dispatch_mode",
    "skip_one_torch_function",
]

_DEVICES = ("CPU", "CUDA", "Other", "Meta", "Functionality")
AUTOGRAD_AND_AUTOCAST = DispatchKeySet(DispatchKey.ADInplaceOrView)
for _name in (*(f"Autograd{device}" for device in _DEVICES), "AutocastCPU", "AutocastCUDA"):
    AUTOGRAD_AND_AUTOCAST = AUTOGRAD_AND_AUTOCAST | DispatchKeySet(getattr(DispatchKey, _name))


def is_composite(func: OpOverload) -> bool:
    """Whether an operator consists of others, of which autograd sees each."""
    return bool(func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return int(torch._C._current_graph_task_id()) >= 0
