"""Install a plan in a simulated module."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_amp.installing.install import install
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.simulation.models_without_values import Subject
from lightning_amp.techniques.contract.protocol import DecomposedDecoder, find_decoders
from lightning_amp.techniques.data.batch_norm import share_batch_statistics
from lightning_amp.techniques.data.gradient_sync import GradientSync
from lightning_amp.techniques.data.row import ShareBatchStatistics
from lightning_amp.techniques.ranks.shards import AnchorShards, Channels

Sizes = tuple[object, ...]


class PlannedRank:
    """A subject, which is changed, with a plan carried out on it, as one rank of the mesh holds it."""

    def __init__(self, subject: Subject, plan: Plan, mesh: DeviceMesh) -> None:
        self.module = cast(Any, subject.module)
        self.batch = subject.batch
        installed = install(subject.module, plan, mesh)
        if any(isinstance(rule.spec, ShareBatchStatistics) for rule in plan.rules):
            share_batch_statistics(subject.module, mesh["data"])
        self.parameters = list(subject.module.parameters())
        self.gradients = _SureSync(
            self.parameters, mesh, partial=installed.partial, sharded=[part.shard for part in installed.sharded]
        )
        self.optimizers: list[Optimizer] = self.module.configure_optimizers()

    @property
    def sizes(self) -> Sizes:
        """What the memory of ranks of one plan can differ by: equal sizes, equal memory."""
        module = cast(nn.Module, self.module)
        tensors = (t.shape for t in (*module.parameters(), *module.buffers()))
        shares = [share for child in module.modules() for share in vars(child).values()]
        channels = (share.width for share in shares if isinstance(share, Channels))
        rows = ((len(s.own), s.before, s.after) for s in shares if isinstance(s, AnchorShards))
        strata = (share for share in shares if isinstance(share, range))
        return (*tensors, *channels, *rows, *strata)

    def decoder(self) -> DecomposedDecoder | None:
        """The largest decomposed decoder."""
        found = find_decoders(self.module).values()
        return max(found, key=lambda d: d.n_anchors * len(d.strata), default=None)


class _SureSync(GradientSync):
    """The reduction of gradients where the ranks together are known to reach all partial parameters, and each of them
    the same others.
    """

    def _agree(self, grads: Mapping[int, Tensor]) -> list[int]:
        everyone = torch.empty(len(self._parameters), dtype=torch.uint8, device="meta")
        all_reduce(everyone, ReduceOp.MAX, group=self._everyone)
        return sorted(self._reached | self._partial)
