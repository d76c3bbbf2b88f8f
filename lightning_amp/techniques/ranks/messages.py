"""Send a tensor from rank to rank, through host memory where gloo connects ranks on GPUs: it reads no GPU's memory."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def sendable(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensor as the group's backend can send it."""
    return tensor.cpu() if _through_host(tensor, group) else tensor


def receive(tensor: Tensor, group: ProcessGroup, source: int, tag: int) -> None:
    """Receive into a tensor from a rank of the group."""
    arriving = torch.empty_like(tensor, device="cpu") if _through_host(tensor, group) else tensor
    dist.recv(arriving, group=group, group_src=source, tag=tag)
    if arriving is not tensor:
        tensor.copy_(arriving)


def _through_host(tensor: Tensor, group: ProcessGroup) -> bool:
    return tensor.is_cuda and dist.get_backend(group) == "gloo"
