"""What stages send each other: activations and the state of the random numbers forward, gradients back.

A receiver knows the shapes, for it has placeholders of what it waits for; so nothing but values is sent, and
micro-batches may differ in size. Every tensor of a micro-batch has a tag of its own, and order does not matter. A
floating tensor has a gradient sent back, zeros where it has none: whether the stage before needs it is not known here.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp._torch import tree_flatten, tree_leaves, tree_unflatten
from lightning_amp.errors import InstallError

MOST = 64
"""Tensors that a block may return."""


class Messages:
    """Between the stages of one step; `wait` ends it.

    Args:
        mesh: The model axis.
        stages: Of the pipeline; stage s is on rank s mod the size of the axis.
        device: Of the run.
    """

    def __init__(self, mesh: DeviceMesh, stages: int, device: torch.device) -> None:
        self._group, self._ranks = mesh.get_group(), mesh.size()
        self._stages, self._device = stages, device
        # with what is sent, which has to stay until it is
        self._sent: list[tuple[Work | None, Tensor]] = []

    def send_on(self, stage: int, micro_batch: int, result: Any) -> None:
        """Send what a stage's last block has returned, and the state of its random numbers, to the next stage."""
        tensors = _tensors(result)
        for i, tensor in enumerate([torch.get_rng_state(), *tensors]):
            self._send(tensor.detach(), stage + 1, self._tag(stage, micro_batch, i))

    def receive(self, stage: int, micro_batch: int, placeholders: Any) -> tuple[Any, list[Tensor]]:
        """What the stage before sends; the random numbers go on as it left them.

        Returns:
            The same nesting as the placeholders with values, and the leaves of the graph in it that need gradients.
        """
        state = torch.empty_like(torch.get_rng_state())
        self._receive(state, stage - 1, self._tag(stage - 1, micro_batch, 0))
        torch.set_rng_state(state)
        flat, form = tree_flatten(placeholders)
        leaves, values, i = [], [], 0
        for value in flat:
            if isinstance(value, Tensor):
                i += 1
                own = torch.empty(value.shape, dtype=value.dtype, device=self._device)
                self._receive(own, stage - 1, self._tag(stage - 1, micro_batch, i))
                value = own
                if own.is_floating_point() and torch.is_grad_enabled():
                    leaves.append(own.requires_grad_())
                    # a block may write into what it is handed, which it may not into a leaf
                    value = own.clone()
            values.append(value)
        return tree_unflatten(values, form), leaves

    def send_back(self, stage: int, micro_batch: int, leaves: Sequence[Tensor]) -> None:
        """Send the gradients of what a stage has received to the stage before."""
        for i, leaf in enumerate(leaves):
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            self._send(grad, stage - 1, self._tag(self._stages + stage, micro_batch, i))

    def receive_back(self, stage: int, micro_batch: int, result: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Those tensors of what a stage has returned that need gradients, and their gradients."""
        floating = [tensor for tensor in _tensors(result) if tensor.is_floating_point()]
        outputs, grads = [], []
        for i, tensor in enumerate(floating):
            grad = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            self._receive(grad, stage + 1, self._tag(self._stages + stage + 1, micro_batch, i))
            if tensor.requires_grad:
                outputs.append(tensor)
                grads.append(grad)
        return outputs, grads

    def wait(self) -> None:
        """Until all that was sent has arrived."""
        while self._sent:
            work, _ = self._sent.pop()
            wait_until_sent(work)

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        tensor = tensor.contiguous()
        to = dist.get_global_rank(self._group, stage % self._ranks)
        self._sent.append((dist.isend(tensor, to, group=self._group, tag=tag), tensor))

    def _receive(self, tensor: Tensor, stage: int, tag: int) -> None:
        dist.recv(tensor, dist.get_global_rank(self._group, stage % self._ranks), group=self._group, tag=tag)

    def _tag(self, stage: int, micro_batch: int, i: int) -> int:
        return (micro_batch * 2 * self._stages + stage) * MOST + i


def wait_until_sent(work: Work | None) -> None:
    """Wait for another stage to take what it was sent; by this function a rank is known to wait for others (faults)."""
    assert work is not None, "a rank of the group sends"
    work.wait()


def _tensors(result: Any) -> list[Tensor]:
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if len(found) >= MOST:
        raise InstallError(
            f"a step was to be run as stages of a pipeline, and a block returns {len(found)!r} tensors; fewer than"
            f" {MOST!r} can be sent: leave 'pipeline' out"
        )
    return found
