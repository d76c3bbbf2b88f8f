"""Wrap the private parts of torch's `fully_shard` that this technique calls; there are no public ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

# the marks that `fully_shard` leaves on a module
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping as composable_states

# state of a `fully_shard` module: idle, forward or backward pass
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def make_root(root: Any) -> None:
    """Make a module the root of `fully_shard`; by default the root is the first module that runs, maybe a block."""
    root._get_fsdp_state()._lazy_init()


def begin_gathered(root: Any) -> None:
    """Gather the root's `fully_shard` parameters, as its forward does; `training_step` does not call forward."""
    # torch before 2.13 moves the arguments to an accelerator and reads the first one, so there must be one
    root._get_fsdp_state()._pre_forward(root, (None,), {})
    _drop_received(root)


def _drop_received(root: Any) -> None:
    """Release the buffer of the last gathered unit; torch does so only at the end of the root's forward."""
    context = root._get_fsdp_state()._comm_ctx
    if (received := context.all_gather_state) is not None:
        for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
            stream.wait_event(received.event)
        context.all_gather_state = None


def end_gathered(root: Any) -> None:
    """Run the hooks that follow the root's forward; its parameters stay gathered."""
    root._get_fsdp_state()._post_forward(root, (), None)


def start_backward(root: Any, loss: torch.Tensor) -> None:
    """Register the root's pre-backward hook on a loss, so that the loss's backward pass reduces gradients."""
    _drop_received(root)
    loss.register_hook(root._get_fsdp_state()._pre_backward)  # type: ignore[no-untyped-call]


def forget_step(root: Any) -> None:
    """Reset `fully_shard` after a failed or interrupted step: parameters are sharded, nothing is pending."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    # torch 2.11 and 2.12 lack this method: the same steps by hand
    _drop_received(root)
    state = root._get_fsdp_state()
    stream, comm = state._device_handle.current_stream(), state._comm_ctx
    # a single state in torch 2.11, a list in 2.12
    sent = [getattr(comm, "reduce_scatter_state", None), *getattr(comm, "reduce_scatter_states", ())]
    events = [one.event for one in sent if one is not None]
    for one in state._state_ctx.all_states:
        one._modules_to_run_forward.clear()
        one._training_state = TrainingState.IDLE
        for group in _param_groups(one):
            group._training_state = TrainingState.IDLE
            group.wait_for_unshard()
            events += [group._post_reduce_event, getattr(group._all_reduce_state, "event", None)]
            group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
            group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group.reshard()
    for event in filter(None, events):
        stream.wait_event(event)
    comm.reduce_scatter_state, comm.reduce_scatter_states = None, []
    comm.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _param_groups(state: Any) -> Sequence[Any]:
    """Return a module's groups of parameters that are gathered together."""
    # a single group in torch 2.11
    found = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in found if group is not None]


def undo_fully_shard(root: nn.Module) -> None:
    """Remove everything that `fully_shard` has added to a module, except for its parameters; torch has no inverse."""
    for module in root.modules():
        state = composable_states.pop(module, lambda: None)()
        for attribute in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(module).pop(attribute, None)
        if state is None:
            continue
        held: Any = state
        handles = [held._pre_forward_hook_handle, held._post_forward_hook_handle]
        for group in _param_groups(held):
            handles += group._module_to_pre_save_state_dict_hook_handle.values()
            handles += group._module_to_pre_load_state_dict_hook_handle.values()
            handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]
        for handle in handles:
            handle.remove()
        # a module on which `fully_shard` has failed still has its class
        module.__class__ = type(module).__mro__[getattr(module, "_orig_cls_mro_index", 0)]
