"""Define a strategy over a mesh: data ranks read different cells, ranks of a model group the same ones.

Ranks are row-major in (data, model), so a model group lies inside a node. Its ranks draw the same numbers; sums that
are logged with sync_dist count them once. Of a plan it only knows how batches are split.
"""

import atexit
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed import HashStore, ReduceOp  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.data.batch import tensors_in
from lightning_amp.dist.own_parts import OwnParts
from lightning_amp.dist.sharded_tensor import ShardedTensor
from lightning_amp.errors import DataError
from lightning_amp.lightning.consistency.replicas import seed_workers
from lightning_amp.lightning.consistency.same_batch import make_sure_of_same_batch, share_draws
from lightning_amp.lightning.steps.cell_order import with_same_draws
from lightning_amp.lightning.steps.count_replicas_once import counted_once, unrounded
from lightning_amp.lightning.strategy.hardware import ThisRank, make_groups, make_mesh
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.hic.scores.dense_entries import find_entries
from lightning_amp.techniques.hic.scores.sparse_likelihood import SparseZINB


class MeshStrategy(DDPStrategy):
    """Which cells a rank reads, and what ranks count; AMPStrategy says `_model_ranks` and overrides nothing else."""

    _meshes: dict[tuple[int, ...], DeviceMesh]
    request: Request
    plan: Plan | None

    @classmethod
    def register_strategies(cls, strategy_registry: object) -> None:
        """Nothing: registration.py adds the names when lightning_amp is imported."""

    @property
    def is_distributed(self) -> bool:
        """Lightning gives a distributed sampler to strategies that have this."""
        return True

    @property
    def _model_ranks(self) -> int:
        """Ranks of a model group."""
        raise NotImplementedError

    def setup_distributed(self) -> None:
        """Connect the processes; one process by itself opens no port."""
        environment = self.cluster_environment
        assert environment is not None, "the Trainer sets the environment"
        alone = self.num_nodes * self.num_processes == environment.world_size() == 1
        if alone and not dist.is_initialized():
            backend = self._get_process_group_backend()
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            if backend == "nccl":
                # as Lightning does for the groups that it makes: torch warns of one that is left
                atexit.register(dist.destroy_process_group)
        super().setup_distributed()

    @property
    def own_parts(self) -> OwnParts:
        """Which part of a batch this rank may read alone, for `lightning_amp.own_part` and `as_sharded`."""
        # late, for it reaches every technique, which a Trainer does not need
        from lightning_amp.lightning.strategy.stepped import own_parts_of

        return own_parts_of(self.request, self.plan, self._here)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that train on different cells; `trainer.world_size` counts all ranks."""
        return self.world_size // self._model_ranks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a model group read the same cells."""
        return {"num_replicas": self.data_parallel_size, "rank": self.global_rank // self._model_ranks}

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh with the axes "data" and "model"; there once the processes are connected."""
        return self._mesh_of(self._model_ranks)

    def _mesh_of(self, model_ranks: int) -> DeviceMesh:
        # made once for a shape: process groups are never given back
        key = self.world_size, model_ranks
        if key not in self._meshes:
            self._meshes[key] = make_mesh(self.root_device.type, n_ranks=key[0], model_ranks=model_ranks)
        return self._meshes[key]

    def _groups_of(self, model_ranks: int, shard_ranks: int) -> DeviceMesh:
        """The ranks with the axes "replicate", "shard" and "model": a data axis in groups of so many ranks."""
        key = self.world_size, model_ranks, shard_ranks
        if key not in self._meshes:
            self._meshes[key] = make_groups(
                self.root_device.type, n_ranks=key[0], model_ranks=model_ranks, shard_ranks=shard_ranks
            )
        return self._meshes[key]

    @property
    def _here(self) -> ThisRank:
        return ThisRank(
            rank=self.global_rank,
            n_ranks=self.world_size,
            node_ranks=self.num_processes,
            device=self.root_device,
            broadcast=self.broadcast,
            mesh_of=self._mesh_of,
        )

    def process_dataloader(self, dataloader: object) -> object:
        """Let a model group read the same cells: loader workers draw the same, and so do samplers."""
        seed_workers(dataloader, data_rank=self.distributed_sampler_kwargs["rank"])
        dataloader = super().process_dataloader(dataloader)
        return dataloader if self._model_ranks == 1 else with_same_draws(dataloader, self._share_draws)

    def _share_draws(self) -> None:
        share_draws(mesh=self.mesh["model"], device=self.root_device)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch, once it is certain that a model group reads the same one."""
        differs: DataError | None = None
        # asked here: to cut the model axis out of a mesh takes a tenth of a millisecond and more
        if self._model_ranks > 1:
            try:
                make_sure_of_same_batch(batch, self.mesh["model"], device=self.root_device)
            except DataError as error:
                differs = error
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self._model_ranks > 1 and any(isinstance(tensor, ShardedTensor) for tensor in tensors_in(moved)):
            self.own_parts.model_axis()
            # ranks have read different parts: what these are parts of is compared
            if differs is not None:
                make_sure_of_same_batch(moved, self.mesh["model"], device=self.root_device)
        elif differs is not None:
            raise differs
        if self.lightning_module is not None:
            find_entries(batch, moved, SparseZINB, self.lightning_module)
        return moved

    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor:
        """Reduce over all ranks, as DDPStrategy, but do not round a mean of integers, and sum cells once.

        Anything but a tensor is returned as it is; one of torch's operations is left as it is.
        """
        if not isinstance(tensor, Tensor) or not isinstance(reduce_op, str):
            return super().reduce(tensor, group, reduce_op)
        result = super().reduce(unrounded(tensor, reduce_op), group, reduce_op)
        # a group that the user has chosen is the user's affair
        return result if group is not None else counted_once(result, reduce_op, model_ranks=self._model_ranks)
