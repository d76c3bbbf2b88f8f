"""`Trainer(strategy="amp")`: plan before the optimisers exist, install, train on averaged gradients, undo.

Ranks are row-major in (data, model), so a model group lies inside a node. Its ranks read the same cells and draw the
same numbers; metrics, sums that are logged with sync_dist, and the gradients of what they all compute count them once.
Parameters that S2 has sharded are whole in every checkpoint and, after the run, in the module and its optimisers.

Known limits: those of steps/weighted_steps.py; buffers that a module changes by itself in training, other than shared
batch statistics, differ between ranks (which is told, same_parameters.py) until the next validation, where rank 0's are
taken; `self.all_gather` gathers from all ranks, so a model group's values come once per rank of it; while S2 is
installed `module.state_dict()`, and a norm of gradients that is not taken by the Trainer's clipping, are those of the
rank's shards (`gradient_norm` has all; what ranks then train differently is told, same_parameters.py), and so are norms
of sharded weights.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.lightning._compat import (
    broadcast_module,
    default_pg_timeout,
    optimizers_to_device,
    trainer_of,
)
from lightning_amp.lightning.checkpoints.atomic_file import AtomicCheckpointIO
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.faults.ends_together import EndsTogether
from lightning_amp.lightning.faults.watch import Limits
from lightning_amp.lightning.same_on_ranks.replicas import (
    check_replicas,
    random_state,
    seed_workers,
    set_random_state,
    share_random_state,
    take_buffers_of_first,
)
from lightning_amp.lightning.same_on_ranks.same_batch import make_sure_of_same_batch, share_draws
from lightning_amp.lightning.same_on_ranks.same_parameters import warn_of_differences
from lightning_amp.lightning.steps.cell_order import CellOrder, with_same_draws
from lightning_amp.lightning.steps.cell_weight import CellWeight
from lightning_amp.lightning.steps.count_replicas_once import count_replicas_once, counted_once, unrounded
from lightning_amp.lightning.steps.finite_check import FiniteCheck
from lightning_amp.lightning.steps.step_time import time_steps
from lightning_amp.lightning.steps.weighted_steps import WeightedSteps
from lightning_amp.lightning.strategy.meshes import Meshes
from lightning_amp.lightning.strategy.out_of_memory import advice_on_memory, is_out_of_memory
from lightning_amp.lightning.strategy.refusals import check_callbacks
from lightning_amp.lightning.strategy.registration import register
from lightning_amp.lightning.strategy.request import (
    check_numbers,
    check_paths,
    check_plan,
    check_seconds,
    one_of,
)
from lightning_amp.parallel.s1_data.batch_norm import share_batch_statistics
from lightning_amp.parallel.s1_data.gradient_sync import MIB, GradientSync
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.plan.specs import ShareBatchStatistics


class AMPStrategy(EndsTogether, WeightedSteps):
    """Automatic modality-aware parallelization.

    Attributes:
        policy, strategies, device_memory, model_parallel_size, data_dir, rates: The request, as given.
        unfit: "refuse" or "train": what becomes of a plan that is predicted not to fit.
        asked_plan, asked_balance: The options `plan` and `balance_cells`, as given.
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
        unfit: Literal["refuse", "train"] | None = None,
        rates: str | Path | None = None,
        model_parallel_size: int | Literal["auto"] = "auto",
        data_dir: str | Path | None = None,
        balance_cells: bool | Literal["auto"] = "auto",
        share_batch_statistics: bool = True,
        save_distributed_checkpoint: bool = False,
        bucket_mb: float = 25.0,
        check_finite: bool = False,
        lost_after: float = 60.0,
        stuck_after: float = 1800.0,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        """Keep the request; nothing is decided before `setup`.

        Args:
            accelerator, parallel_devices, cluster_environment, precision_plugin: Set by the Trainer.
            checkpoint_io: As for DDPStrategy.
            policy: "auto" takes the fastest plan that fits, "paper" AMP's fixed mapping from signals to strategies.
            plan: A plan, or the path of one as JSON, to carry out instead of making one.
            strategies: The strategies to use, such as "S1,S3", instead of the policy's.
            device_memory: Budget of one device, as bytes or "24GiB"; None asks the device.
            unfit: Whether to "refuse" or to "train" a plan that is predicted not to fit; None refuses where
                `device_memory` is given, and trains where the device was asked.
            rates: File that `lightning-amp calibrate` wrote, to predict times with; None takes the device's kind.
            model_parallel_size: Ranks of the model axis.
            data_dir: Directory to read the data configuration from; None means the data module's.
            balance_cells: Whether the sampler balances contacts over the ranks; "auto" leaves it to the plan.
            share_batch_statistics: Compute BatchNorm over the cells of all ranks.
            save_distributed_checkpoint: Save a directory to which every rank writes its part; `checkpoint_io` then has
                no say. Either kind is loaded.
            bucket_mb: Largest flat gradient buffer in MiB.
            check_finite: Look at every loss and gradient, and name the module whose output was first not finite.
            lost_after: Seconds of silence after which a rank counts as lost.
            stuck_after: Seconds without progress after which a rank counts as stuck.
            process_group_backend, timeout, start_method: As for DDPStrategy.

        Raises:
            PlanError: A value outside what is allowed.
        """
        one_of("policy", policy, ("auto", "paper"))
        one_of("unfit", unfit, (None, "refuse", "train"))
        one_of("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
        one_of("balance_cells", balance_cells, (True, False, "auto"))
        one_of("share_batch_statistics", share_batch_statistics, (True, False))
        one_of("save_distributed_checkpoint", save_distributed_checkpoint, (True, False))
        one_of("check_finite", check_finite, (True, False))
        check_numbers(model_parallel_size=model_parallel_size, bucket_mb=bucket_mb)
        check_seconds(lost_after=lost_after, stuck_after=stuck_after)
        check_plan(plan, strategies, policy=policy, model_parallel_size=model_parallel_size)
        check_paths(data_dir=data_dir, device_memory=device_memory, rates=rates)
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
        self.unfit = unfit or ("train" if device_memory is None else "refuse")
        self.model_parallel_size = model_parallel_size
        self.data_dir = data_dir
        self.rates = rates
        self.share_batch_statistics = share_batch_statistics
        self.plan: Plan | None = None
        self.asked_plan = plan
        self.asked_balance = balance_cells
        self._save_distributed = save_distributed_checkpoint
        self.check_finite = check_finite
        self._limits = Limits(lost_after=lost_after, stuck_after=stuck_after)
        self._bucket_bytes = int(bucket_mb * MIB)
        self._meshes, self._shards = Meshes(), Shards()
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
        if self.asked_balance != "auto":
            return bool(self.asked_balance)
        return self.plan is not None and self.plan.balance_cells

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh with the axes "data" and "model"; there once the processes are connected.

        Raises:
            PlanError: The mesh of the plan needs another number of ranks than there are.
        """
        return self._meshes.of(self.root_device.type, ranks=self.world_size, model_ranks=self._model_ranks)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoints: complete ones or none, unless the user has chosen otherwise."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    # --- life-cycle ---

    def setup_environment(self) -> None:
        """Connect the processes; all ranks draw on as rank 0 does, and rank 0 as a plain run."""
        drawn = random_state(self.root_device)
        super().setup_environment()
        # ddp starts the streams anew, where a plain run, which shuffles by them, goes on
        set_random_state(drawn, self.root_device)
        if self.world_size > 1:
            share_random_state(broadcast=self.broadcast, device=self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Make ranks equal, plan, install, and only then let the optimisers be made."""
        assert self.accelerator is not None, "the Trainer sets the accelerator before setup"
        assert self.model is not None, "the Trainer sets the model before setup"
        self._remove_installed()
        trainer._data_connector.__class__ = CellOrder
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        any_rank = partial(self.reduce_boolean_decision, all=False)
        check_replicas(self.model, rank=self.global_rank, broadcast=self.broadcast, any_rank=any_rank)
        broadcast_module(self.model)
        self._plan_and_install(trainer)
        if fitting:
            self._share_statistics(self.model)
            self._average_gradients(self.model)
            self.setup_optimizers(trainer)
            self._undo += [self._shards.watch(trainer), time_steps(trainer, self.plan)]
            if self.check_finite:
                scaled = getattr(self.precision_plugin, "scaler", None) is not None
                self._finite = FiniteCheck(self.model, rank=self.global_rank, gradients=not scaled)
                self._undo.append(self._finite.remove)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def _plan_and_install(self, trainer: Trainer) -> None:
        # late, for they reach the reference model and every technique, which a Trainer does not need
        from lightning_amp.adapters.adapt import adapt
        from lightning_amp.lightning.strategy.plan_run import announce, plan_in_force
        from lightning_amp.lightning.strategy.replan import Planned

        assert self.model is not None, "the Trainer sets the model before setup"
        self.plan = None
        foreign = adapt(self.model)
        self._undo.append(foreign.undo)
        plan = plan_in_force(self, trainer, notes=foreign.notes)
        self.plan = plan = replace(plan, notes=(*plan.notes, *foreign.compare(plan)))
        if trainer.state.fn == TrainerFn.FITTING:
            announce(plan, unfit=self.unfit)
        planned = Planned(self, trainer, foreign)
        # before it is installed: a refusal after that is undone too
        self._undo.append(planned.undo)
        installed = planned.install(plan)
        self._undo.append(count_replicas_once(self.model, self.mesh))
        check_callbacks(installed, getattr(trainer, "callbacks", ()))
        self._shards = Shards(self.model, installed.sharded, installed.partial)
        foreign.tell_rows(planned.again)

    def _share_statistics(self, model: nn.Module) -> None:
        """Share batch statistics when the plan says so, or the Trainer's sync_batchnorm."""
        assert self.plan is not None, "installed before"
        planned = any(isinstance(rule.spec, ShareBatchStatistics) for rule in self.plan.rules)
        if planned or isinstance(self._layer_sync, TorchSyncBatchNorm):
            self._undo.append(share_batch_statistics(model, self.mesh["data"]))
        elif self._layer_sync is not None:
            self.model = self._layer_sync.apply(model)

    def _average_gradients(self, model: nn.Module) -> None:
        self._weight = CellWeight(self.mesh["data"], self.root_device)
        self._gradients = GradientSync(
            model.parameters(),
            self.mesh,
            partial=self._shards.partial,
            sharded=[parameter.shard for parameter in self._shards.sharded],
            bucket_bytes=self._bucket_bytes,
            rounds_differently=self.root_device.type == "cuda",
        )
        self._gradients.watch()

    def _remove_installed(self) -> None:
        """Give the module back as it was; no collectives, for other ranks may be gone."""
        while self._undo:
            self._undo.pop()()
        if self._gradients is not None:
            self._gradients.remove()
        self._gradients = self._weight = self._finite = None
        self._shards = Shards()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, as `deepcopy(trainer)` makes: the watch, and what is to be undone, stay the original's."""
        return {**vars(self), "_undo": [], "_watch": None, "_adopted": None}

    def teardown(self) -> None:
        """Make parameters whole again, undo what was installed, then what Lightning does."""
        trainer = trainer_of(self.lightning_module)
        try:
            if trainer is not None:
                self._shards.give_back(self.optimizers, complete=not trainer.interrupted)
            self._remove_installed()
        finally:
            super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Add to an error of memory what was predicted; then say whose fault it is, here and to the other ranks."""
        if is_out_of_memory(exception):
            exception.args = (f"{exception}. {advice_on_memory(self.plan, self.root_device)}",)
        super().on_exception(exception)

    def on_validation_start(self) -> None:
        """Evaluate one model: buffers that each rank has changed by itself in training become rank 0's."""
        self._compare_ranks()
        if self._gradients is not None and self.model is not None and self.data_parallel_size > 1:
            take_buffers_of_first(self.model, self.mesh["data"].get_group())

    def on_train_end(self) -> None:
        """Compare the ranks once more: nothing may have been validated or saved."""
        self._compare_ranks()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with whole parameters; for all ranks, which are compared."""
        state = super().lightning_module_state_dict()
        self._compare_ranks()
        return state

    def _compare_ranks(self) -> None:
        module, trainer = self.lightning_module, trainer_of(self.lightning_module)
        if self._gradients is None or module is None or trainer is None or trainer.interrupted:
            return
        shards = [parameter.shard for parameter in self._shards.sharded]
        warn_of_differences(module, shards, self.mesh, step=trainer.global_step)

    def process_dataloader(self, dataloader: object) -> object:
        """Let a model group read the same cells: loader workers draw alike, and so do samplers."""
        seed_workers(dataloader, data_rank=self.distributed_sampler_kwargs["rank"])
        dataloader = super().process_dataloader(dataloader)
        return dataloader if self._model_ranks == 1 else with_same_draws(dataloader, self._share_draws)

    def _share_draws(self) -> None:
        share_draws(mesh=self.mesh["model"], device=self.root_device)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch, once it is certain that a model group reads the same one."""
        make_sure_of_same_batch(batch, self.mesh["model"], device=self.root_device)
        return super().batch_to_device(batch, device, dataloader_idx)

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
        result = super().reduce(unrounded(tensor, reduce_op), group, reduce_op)
        # a group that the user has chosen is the user's affair
        return result if group is not None else counted_once(result, reduce_op, model_ranks=self._model_ranks)
