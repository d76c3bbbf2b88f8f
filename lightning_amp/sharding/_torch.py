"""Import the private names of torch that sharded tensors need, with the reason for each."""

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C import _dispatch_tls_local_exclude_set as excluded_keys
from torch._C import _dispatch_tls_local_include_set as included_keys

# re-enables __torch_function__ of Tensor subclasses
from torch._C import _EnableTorchFunction as enable_torch_function

# excludes the keys of autograd and autocast, so that a subclass gets an operator first; restores them for the shards
from torch._C import _ForceDispatchKeyGuard as force_dispatch_keys

# disables dispatch modes for operators on wrappers, so that they receive only operators on shards
from torch._C import _len_torch_dispatch_stack as n_dispatch_modes

# whether a backward pass, also of torch.autograd.grad, needs the gradient of a node
from torch._C import _will_engine_execute_node as is_reached

# torch.compiler.disable, which imports the compiler at the first call: a compiler that traces collectives on fake
# tensors would drop them
from torch._compile import _disable_dynamo as never_compiled

# module through which `torch.autograd.Function.apply` unwraps its arguments, also if `apply` was bound earlier
from torch._functorch import utils as functorch_utils

# an operator with all its overloads
from torch._ops import OpOverloadPacket as OpOverloadPacket

# computes shapes without modes that count the operators of a step
from torch.utils._python_dispatch import _disable_current_modes as no_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

from lightning_amp._torch import OpOverload

try:
    # runs a torch function written in Python, and dispatches the functions that it calls
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
    """Whether an operator is composed of others, which autograd records one by one."""
    return bool(func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


def in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return int(torch._C._current_graph_task_id()) >= 0
