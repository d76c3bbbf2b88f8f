"""`Trainer(strategy="amp")`: plan before the optimisers exist, install, train on averaged gradients, undo.

Ranks are row-major in (data, model), so a model group lies inside a node.
Known limits: an optimiser from `self.optimizers(use_pl_optimizer=False)` steps without the check for
gradients that were not averaged; buffers that a module changes by itself in training, other than shared batch
statistics, differ between ranks until the next validation, where rank 0's are taken.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed import ReduceOp, broadcast, get_global_rank
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader

from lightning_amp.errors import PlanError
from lightning_amp.lightning._compat import (
    broadcast_module,
    default_pg_timeout,
    optimizers_to_device,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_amp.lightning.cells import CellWeight
from lightning_amp.lightning.options import check_numbers, check_paths, check_plan, one_of
from lightning_amp.lightning.registration import register
from lightning_amp.lightning.replicas import check_replicas, decide_on_rank_zero, share_random_state
from lightning_amp.parallel.batch_norm import SharedBatchNorm, share_batch_statistics
from lightning_amp.parallel.gradients import MIB, GradientSync
from lightning_amp.planning.plan import Plan
from lightning_amp.planning.report import plan_report, shortfall
from lightning_amp.planning.rules import with_balance, without_shared_statistics
from lightning_amp.planning.specs import ShareBatchStatistics

RAW_BACKWARD = (
    "Gradients reached an optimizer step without having been averaged over ranks: in manual optimization call"
    " self.manual_backward(loss), not loss.backward(). They are averaged now, every rank counted equally, but"
    " gradient clipping before this point has seen the gradients of one rank only."
)


class AMPStrategy(DDPStrategy):
    """Automatic modality-aware parallelization.

    Attributes:
        policy, strategies, device_memory, model_parallel_size, data_dir: The request, as given.
        share_batch_statistics: Whether BatchNorm is to see the cells of all ranks.
        plan: The plan in force, None before `setup`.
    """

    strategy_name = "amp"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        policy: Literal["auto", "paper"] = "auto",
        plan: str | Path | Plan | None = None,
        strategies: list[str] | str | None = None,
        device_memory: str | int | None = None,
        model_parallel_size: int | Literal["auto"] = "auto",
        data_dir: str | Path | None = None,
        balance_cells: bool | Literal["auto"] = "auto",
        share_batch_statistics: bool = True,
        bucket_mb: float = 25.0,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        """Keep the request; nothing is decided before `setup`.

        Args:
            accelerator: Set by the Trainer.
            parallel_devices: Set by the Trainer.
            cluster_environment: Set by the Trainer.
            checkpoint_io: As for DDPStrategy.
            precision_plugin: Set by the Trainer.
            policy: "paper" is AMP's fixed mapping from signals to strategies.
            plan: A plan, or the path of one as JSON, to carry out instead of making one.
            strategies: The strategies to use, "S1" to "S5", instead of the policy's.
            device_memory: Budget of one device, as bytes or "24GiB"; None asks the device.
            model_parallel_size: Ranks of the model axis.
            data_dir: Directory to read the data configuration from; None means the data module's.
            balance_cells: Whether the sampler balances contacts over the ranks; "auto" leaves it to the plan.
            share_batch_statistics: Compute BatchNorm over the cells of all ranks.
            bucket_mb: Largest flat gradient buffer in MiB.
            process_group_backend: As for DDPStrategy.
            timeout: As for DDPStrategy.
            start_method: As for DDPStrategy.

        Raises:
            PlanError: A value outside what is allowed.
        """
        one_of("policy", policy, ("auto", "paper"))
        one_of("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
        one_of("balance_cells", balance_cells, (True, False, "auto"))
        one_of("share_batch_statistics", share_batch_statistics, (True, False))
        check_numbers(model_parallel_size=model_parallel_size, bucket_mb=bucket_mb)
        check_plan(plan, strategies, policy=policy, model_parallel_size=model_parallel_size)
        check_paths(data_dir=data_dir, device_memory=device_memory)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.policy = policy
        self.strategies = strategies
        self.device_memory = device_memory
        self.model_parallel_size = model_parallel_size
        self.data_dir = data_dir
        self.share_batch_statistics = share_batch_statistics
        self.plan: Plan | None = None
        self._asked_plan = plan
        self._asked_balance = balance_cells
        self._bucket_bytes = int(bucket_mb * MIB)
        self._meshes: dict[tuple[int, int], DeviceMesh] = {}
        self._undo: list[Callable[[], None]] = []
        self._gradients: GradientSync | None = None
        self._weight: CellWeight | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add the names "amp", "amp_spawn", "amp_fork" and "amp_notebook"."""
        register(strategy_registry)

    # --- ranks ---

    @property
    def is_distributed(self) -> bool:
        """Lightning gives a distributed sampler to strategies that have this."""
        return True

    @property
    def _model_ranks(self) -> int:
        if self.plan is not None:
            return self.plan.mesh.model
        return 1 if self.model_parallel_size == "auto" else self.model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that train on different cells; `trainer.world_size` counts all ranks."""
        return self.world_size // self._model_ranks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a model group read the same cells."""
        return {"num_replicas": self.data_parallel_size, "rank": self.global_rank // self._model_ranks}

    @property
    def balance_cells(self) -> bool:
        """Whether the sampler is to balance contacts over the ranks."""
        if self._asked_balance != "auto":
            return bool(self._asked_balance)
        return self.plan is not None and self.plan.balance_cells

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh with the axes "data" and "model"; there once the processes are connected.

        Raises:
            PlanError: The mesh of the plan needs another number of ranks than there are.
        """
        shape = (self.data_parallel_size, self._model_ranks)
        if shape[0] * shape[1] != self.world_size:
            raise PlanError(
                f"model_parallel_size={self._model_ranks!r} was asked for, the run has {self.world_size}"
                " ranks; it must divide them. Change `devices` or `num_nodes` of the Trainer, or model_parallel_size"
            )
        if shape not in self._meshes:
            # kept, for every mesh makes process groups that are never given back
            self._meshes[shape] = init_device_mesh(
                self.root_device.type, shape, mesh_dim_names=("data", "model")
            )
        return self._meshes[shape]

    # --- life-cycle ---

    def setup_environment(self) -> None:
        """Connect the processes; without `seed_everything`, let all ranks draw what rank 0 draws."""
        super().setup_environment()
        if self.world_size > 1 and "PL_GLOBAL_SEED" not in os.environ:
            share_random_state(broadcast=self.broadcast, device=self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Make ranks equal, plan, install, and only then let the optimisers be made."""
        assert self.accelerator is not None, "the Trainer sets the accelerator before setup"
        assert self.model is not None, "the Trainer sets the model before setup"
        self._remove_installed()
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        check_replicas(
            self.model, rank=self.global_rank, broadcast=self.broadcast, any_rank=self._on_any_rank
        )
        broadcast_module(self.model)
        self._plan_and_install(trainer)
        if fitting:
            self._share_statistics(self.model)
            self._average_gradients(self.model)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def _plan_and_install(self, trainer: Trainer) -> None:
        # late, for both reach the reference model and every technique, which a Trainer does not need
        from lightning_amp.lightning.planner import plan_run, predict_anew
        from lightning_amp.parallel.install import install

        def decide() -> Plan:
            if self._asked_plan is None:
                return plan_run(self, trainer)
            given = self._asked_plan if isinstance(self._asked_plan, Plan) else Plan.read(self._asked_plan)
            return predict_anew(given, self, trainer)

        self.plan = None
        plan = decide_on_rank_zero(decide, rank=self.global_rank, broadcast=self.broadcast)
        if plan.mesh.data * plan.mesh.model != self.world_size:
            raise PlanError(
                f"a plan for {plan.mesh.data} x {plan.mesh.model} ranks (data x model) was asked for, the run"
                f" has {self.world_size} ranks; make a plan for as many, or change `devices` of the Trainer"
            )
        if not self.share_batch_statistics:
            plan = without_shared_statistics(plan)
        wish = getattr(getattr(trainer, "datamodule", None), "balance", None)
        wish = self._asked_balance if wish is None else wish
        self.plan = plan = plan if wish == "auto" else with_balance(plan, balance=bool(wish))
        if trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(f"\n{plan_report(plan)}\n")
            if plan.fits is False:
                rank_zero_warn(shortfall(plan))
        assert self.model is not None, "the Trainer sets the model before setup"
        self._undo.append(install(self.model, plan, self.mesh).undo)

    def _share_statistics(self, model: nn.Module) -> None:
        """Share batch statistics when the plan says so, or the Trainer's sync_batchnorm."""
        assert self.plan is not None, "installed before"
        planned = any(isinstance(rule.spec, ShareBatchStatistics) for rule in self.plan.rules)
        if planned or isinstance(self._layer_sync, TorchSyncBatchNorm):
            self._undo.append(share_batch_statistics(model, self.mesh["data"]))
        elif self._layer_sync is not None:
            self.model = self._layer_sync.apply(model)

    def _average_gradients(self, model: nn.Module) -> None:
        group = self.mesh["data"].get_group()
        self._weight = CellWeight(group, self.root_device)
        self._gradients = GradientSync(model.parameters(), group, bucket_bytes=self._bucket_bytes)
        self._gradients.watch()

    def _remove_installed(self) -> None:
        """Give the module back as it was; no collectives, for other ranks may be gone."""
        while self._undo:
            self._undo.pop()()
        if self._gradients is not None:
            self._gradients.remove()
        self._gradients = self._weight = None

    def teardown(self) -> None:
        """Undo what was installed, then what Lightning does."""
        self._remove_installed()
        super().teardown()

    def on_validation_start(self) -> None:
        """Evaluate one model: buffers that each rank has changed by itself in training become rank 0's."""
        if self._gradients is None or self.model is None or self.data_parallel_size == 1:
            return
        group = self.mesh["data"].get_group()
        for module in self.model.modules():
            if not isinstance(module, SharedBatchNorm):
                for buffer in module.buffers(recurse=False):
                    broadcast(buffer, src=get_global_rank(group, 0), group=group)

    def process_dataloader(self, dataloader: object) -> object:
        """Seed loader workers by the data coordinate, so that a model group reads the same random cells."""
        seeded = isinstance(dataloader, DataLoader) and int(os.environ.get("PL_SEED_WORKERS", "0"))
        if seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            rank = self.distributed_sampler_kwargs["rank"]
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
        return super().process_dataloader(dataloader)

    # --- steps ---

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The module's training step, with its batch noted for weighting."""
        if self._weight is not None:
            self._weight.start(args[0] if args else None)
        return super().training_step(*args, **kwargs)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Backward of the rank's share of the union batch's mean loss, then average the gradients over ranks.

        Averaged before `on_after_backward`, so that hooks and clipping see what the optimiser will.
        """
        module = self.lightning_module
        assert module is not None, "the Trainer sets the module before setup"
        assert self._gradients is not None, "backward comes after setup for fitting"
        self.pre_backward(closure_loss)
        self._gradients.watch()
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(self._share_of(closure_loss), module, optimizer, *args, **kwargs)
        self._gradients.reduce()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _share_of(self, loss: Tensor) -> Tensor:
        assert self._weight is not None, "set in setup for fitting"
        weight = self._weight.value()
        return loss if weight == 1.0 else loss * weight

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Leave gradients on their ranks, for accumulation; the next backward outside averages their sum."""
        if self._gradients is None:
            yield
            return
        before, self._gradients.blocked = self._gradients.blocked, True
        try:
            yield
        finally:
            self._gradients.blocked = before

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step, after a last look in manual optimisation for gradients that were not averaged."""

        def averaged() -> Any:
            loss = closure()
            self._average_rest()
            # its line search and stopping rules read the loss, and ranks must take the same number of steps
            is_read = isinstance(optimizer, LBFGS) and isinstance(loss, Tensor)
            return self.reduce(self._share_of(loss).detach().clone()) if is_read else loss

        return super().optimizer_step(optimizer, averaged, model, **kwargs)

    def _average_rest(self) -> None:
        """Average what manual optimisation has left: a raw `loss.backward()`, or a step while blocked."""
        module = self.lightning_module
        if self._gradients is None or module is None or module.automatic_optimization:
            return
        if self._gradients.pending and not self._gradients.blocked:
            rank_zero_warn(RAW_BACKWARD)
        self._gradients.reduce(force=True)

    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor:
        """Reduce over all ranks, as DDPStrategy, but do not round a mean of integers, and sum cells once.

        Args:
            tensor: Anything but a tensor is returned as it is.
            group: None means all ranks.
            reduce_op: "mean", "sum" and so on, or torch's operation, which is left as it is.
        """
        if not isinstance(tensor, Tensor) or not isinstance(reduce_op, str):
            return super().reduce(tensor, group, reduce_op)
        if reduce_op.lower() in ("mean", "avg") and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.get_default_dtype())
        result = super().reduce(tensor, group, reduce_op)
        if reduce_op.lower() == "sum" and group is None and self._model_ranks > 1:
            # every rank of a model group has added the same cells
            result = (result / self._model_ranks).to(result.dtype)
        return result

    def _on_any_rank(self, condition: bool) -> bool:
        return self.reduce_boolean_decision(condition, all=False)
