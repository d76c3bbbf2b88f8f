"""Check that all ranks issue the same collectives of sharded parameters in the same order.

Collectives find each other by their order alone. A rank that skips a block, as a branch on its own cells may, would
take another block's parameters for those of its own: numbers without meaning where the sizes agree, and no end where
they do not. So before each collective the ranks compare what it is for: one all-reduce of two integers.

On a CPU they stop before the collective. On a GPU, where looking at a number waits for all that was launched, they look
at the end of the backward pass, before the optimiser's step.
"""

import zlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import ModelError
from lightning_amp.techniques.ranks.collectives import wait_in_all_reduce


class Agreement:
    """What the ranks of a mesh axis are about to do, compared."""

    def __init__(self, mesh: DeviceMesh, technique: str) -> None:
        self._mesh, self._technique = mesh, technique
        self._unseen: list[tuple[str, Tensor]] = []

    def on(self, what: str) -> None:
        """This rank is about to do something; a collective.

        Raises:
            ModelError: Another rank is about to do something else; on every rank.
        """
        number = zlib.crc32(what.encode())
        box = torch.tensor([number, -number], device=self._mesh.device_type)
        wait_in_all_reduce(dist.all_reduce(box, dist.ReduceOp.MAX, group=self._mesh.get_group(), async_op=True))
        self._unseen.append((what, box))
        if self._mesh.device_type == "cpu":
            self.look()

    def look(self) -> None:
        """Look at what was compared since the last time; a ModelError on every rank where something differed."""
        unseen, self._unseen = self._unseen, []
        for what, (largest, smallest) in zip(
            [what for what, _ in unseen],
            torch.stack([box for _, box in unseen]).tolist() if unseen else [],
            strict=True,
        ):
            if largest != -smallest:
                raise ModelError(self._told(what))

    def _told(self, what: str) -> str:
        everyones: list[str] = [""] * self._mesh.size()
        dist.all_gather_object(everyones, what, group=self._mesh.get_group())
        ranks = ", ".join(f"rank {rank} {what}" for rank, what in enumerate(everyones))
        return (
            f"under {self._technique} all ranks use the same blocks in the same order, for a block's parameters lie on"
            f" all of them; found: {ranks}. Let every rank run every block, a block that it does not need times"
            " zero, or train with strategies='S1'"
        )
