"""Send a tensor from rank to rank, by a copy where the group's backend does not read the memory in which it is.

gloo reads no GPU's memory, and NCCL no other.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def sendable(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensor as the group's backend can send it."""
    kind = _kind_of_sent(tensor, group)
    return tensor if kind == tensor.device.type else tensor.to(kind)


def receive(tensor: Tensor, group: ProcessGroup, source: int, tag: int) -> None:
    """Receive into a tensor from a rank of the group."""
    kind = _kind_of_sent(tensor, group)
    arriving = tensor if kind == tensor.device.type else torch.empty_like(tensor, device=kind)
    dist.recv(arriving, group=group, group_src=source, tag=tag)
    if arriving is not tensor:
        tensor.copy_(arriving)


def _kind_of_sent(tensor: Tensor, group: ProcessGroup) -> str:
    """Return the type of the device from which the group sends a tensor."""
    # such as "cpu:gloo,cuda:nccl"
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    kind = tensor.device.type
    if backends.get(kind) == "gloo":
        return "cpu"
    return kind if kind in backends else next(iter(backends))
