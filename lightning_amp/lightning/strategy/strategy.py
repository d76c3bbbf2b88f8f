"""Define AMPStrategy, `Trainer(strategy="amp")`: plan, install the plan, train on averaged gradients, undo.

Checkpoint files contain full parameters, also if S2 or fsdp shards them. After the run, the module and its optimisers
have full parameters too.

Known limits: those of steps/training_step.py. Buffers that a module changes in training, other than shared batch
statistics, differ between ranks until the next validation, which takes those of rank 0. `self.all_gather` gathers from
all ranks, so the values of a model group occur once per rank. Under S2, fsdp and pipeline, `module.state_dict()` and
norms computed by hand cover only the rank's shards; `gradient_norm` covers all. Ranks that differ are reported.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_amp.costs.rule import splits_on_host
from lightning_amp.footprint.find_blocks import named_blocks
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.lightning._compat import broadcast_module, default_pg_timeout, optimizers_to_device, trainer_of
from lightning_amp.lightning.callbacks.model_summary import leave_out_flops
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.checkpoints.write_checkpoint import AtomicCheckpointIO
from lightning_amp.lightning.consistency.replicas import check_replicas, take_buffers_of_first
from lightning_amp.lightning.consistency.same_parameters import warn_of_differences
from lightning_amp.lightning.faults.activity import is_out_of_memory
from lightning_amp.lightning.faults.failure_watch import FailureWatch
from lightning_amp.lightning.faults.launchers import end_as_ours, print_mistakes_once
from lightning_amp.lightning.steps.cells import CellOrder
from lightning_amp.lightning.steps.out_of_memory import explain
from lightning_amp.lightning.steps.step_time import time_steps
from lightning_amp.lightning.steps.training_step import TrainingStep
from lightning_amp.lightning.strategy.hardware import all_but_parameters_to, has_room, let_segments_grow
from lightning_amp.lightning.strategy.mesh_strategy import MeshStrategy
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.random_streams import random_streams, set_random_streams
from lightning_amp.techniques.data.gradient_sync import MIB
from lightning_amp.techniques.deferred import check_deferred, is_deferred, without_memory
from lightning_amp.techniques.option_checks import one_of
from lightning_amp.techniques.table import technique_of_steps

OF_LIGHTNING = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "timeout", "start_method"),
)
"""Options that are passed on to DDPStrategy."""


class AMPStrategy(MeshStrategy):
    """Train a module within a memory budget: profile its step, choose a plan, and install the plan's techniques.

    Attributes:
        request: The options, as given; most are attributes of the strategy too.
        on_predicted_oom: What to do with a plan that is predicted to run out of memory: "refuse" or "warn".
        plan, predicted_step: The installed plan, and the profile of its step if this rank has counted it, else None.
        own_statistics: Whether ranks may change buffers from their own cells; False if the policy chooses the plan.
        pipelined_steps: Runner of a pipeline's steps, with the times of the last step; None without a pipeline.
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
        blocks: list[str | type[nn.Module]] | None = None,
        device_memory: str | int | Sequence[str | int] | None = None,
        on_predicted_oom: Literal["refuse", "warn"] | None = None,
        unfit: Literal["refuse", "train"] | None = None,
        rates: str | Path | None = None,
        rescue: bool = False,
        model_parallel_size: int | Literal["auto"] = "auto",
        data_dir: str | Path | None = None,
        balance_cells: bool | Literal["auto"] = "auto",
        share_batch_statistics: bool = True,
        save_distributed_checkpoint: bool = False,
        bucket_mb: float = 25.0,
        check_finite: bool = False,
        lost_after: float = 60.0,
        stuck_after: float = 1800.0,
        micro_batches: int | None = None,
        schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None,
        fsdp_ranks: int | None = None,
        fsdp_offload: bool = False,
        chunk_queries: int | None = None,
        chunk_policy: Literal["auto", "paper"] = "auto",
        host_memory: str | int | None = None,
        device_speeds: Literal["measure"] | Sequence[float] | None = None,
        sequence_dim: Mapping[str, int | Sequence[int]] | str = "auto",
        sequence_sizes: str | Sequence[int] = "even",
        sequence_grid: str = "",
        tensor_grid: tuple[int, int, int] | None = None,
        tensor_overlap: Sequence[str] = ("all_reduce", "reduce_scatter", "all_gather"),
        tensor_cache: str | int = "0B",
        compile: Literal["auto"] | bool = False,
        verbose: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        """Store the options; the plan is made in `setup`.

        Args:
            accelerator, parallel_devices, cluster_environment, precision_plugin: Set by the Trainer.
            checkpoint_io, process_group_backend, timeout, start_method: As for DDPStrategy.
            policy: "auto" takes the fastest plan that fits; "paper" AMP's fixed mapping from signals to strategies.
            plan: A plan, or the path of its JSON file, to use instead of making one.
            strategies: The strategies to use, such as "S1,S3", instead of the policy's.
            blocks: Submodules that are blocks, for techniques that work on blocks: classes, paths of classes, names, or
                patterns of names; None takes the children of lists and sequences.
            device_memory: Budget per device, as bytes or "24GiB", or a list of them; None uses the device's memory. On
                a GPU it is what the process takes, with CUDA's context and fragments, on a CPU that of tensors.
            on_predicted_oom, unfit: "refuse" a plan that is predicted to run out of memory, or "warn" and train; None
                refuses if `device_memory` is given. `unfit` is the deprecated name, and its "train" is "warn".
            rates: File written by `lightning-amp calibrate`, to predict times; None uses those of the device type.
            rescue: Whether a batch that runs out of memory runs again with a leaner plan, up to three times in a fit.
            model_parallel_size: Ranks of the model axis.
            data_dir: Directory of the data configuration; None uses that of a SingleCellDataModule.
            balance_cells: Whether the sampler balances contacts over the ranks; "auto" leaves it to the plan.
            share_batch_statistics: Compute BatchNorm over the cells of all ranks.
            save_distributed_checkpoint: Save a directory of shards; `checkpoint_io` is not used. Both forms are loaded.
            bucket_mb: Largest flat gradient buffer in MiB.
            check_finite: Check every loss and gradient, and report the module whose output was first not finite.
            lost_after, stuck_after: Seconds without a message, or progress, after which a rank counts as failed.
            micro_batches, schedule: For a pipeline: the number of micro-batches (None: the fastest), and their order.
            fsdp_ranks: For `strategies="fsdp"`: ranks of a sharding group, such as those of a node; None uses all.
            fsdp_offload: For `strategies="fsdp"`: whether parameter shards are kept in host memory.
            chunk_queries: For `strategies="S3"`: queries of a chunk of local attention; None for 128, as in the paper.
            chunk_policy: For `strategies="chunk"`: choose regions by time, "auto", or by AutoChunk's cost, "paper".
            host_memory: Most host memory of a rank; None: its part of 80 % of what its node has free.
            device_speeds: Speeds of all ranks, by which they get stages and strata; "measure"; or None, equal speeds.
            tensor_grid: For `strategies="tensor3d"`: ranks (x, y, z); x and y split features, z rows of the batch.
            tensor_overlap: For `strategies="tensor3d"`: collectives that overlap with compute.
            tensor_cache: For `strategies="tensor3d"`: bytes of gathered parameters that are kept for the backward pass.
            sequence_dim: For `strategies="sequence"`, or "tensor3d" if z splits samples: the dims that are split.
            sequence_sizes, sequence_grid: For "sequence": "even", "causal" or shard sizes; ranks of two dims, as "2x2".
            compile: Whether blocks run through torch.compile; "auto": if a GPU waits for launches and the run is long.
            verbose: Show the complete report of the plan instead of its summary of five lines.

        Raises:
            PlanError: A value is not allowed, or options contradict each other.
        """
        print_mistakes_once()
        given = locals()
        one_of("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
        self.request = Request(**{field.name: given[field.name] for field in fields(Request)})
        super().__init__(**{name: given[name] for name in OF_LIGHTNING})
        self.policy, self.strategies = policy, strategies
        self.on_predicted_oom = "refuse" if self.request.refuses else "warn"
        self.device_memory, self.rates, self.data_dir = device_memory, rates, data_dir
        self.model_parallel_size, self.share_batch_statistics = model_parallel_size, share_batch_statistics
        self.own_statistics = not self.request.chooses
        self.plan = self.predicted_step = self.pipelined_steps = None
        self._failures = FailureWatch(self, lost_after=lost_after, stuck_after=stuck_after)
        self._shards = Shards()
        self._step: TrainingStep | None = None  # only in a fit
        self._deferred: bool | None = None  # set from setup to teardown
        self._undo: list[Callable[[], None]] = []

    @property
    def _model_ranks(self) -> int:
        if self.plan is not None:
            return self.plan.mesh.model
        return 1 if self.request.model_parallel_size == "auto" else self.request.model_parallel_size

    @property
    def balance_cells(self) -> bool:
        """Whether the sampler balances contacts over the ranks."""
        planned = self.plan is not None and self.plan.balance_cells
        return planned if self.request.balance_cells == "auto" else self.request.balance_cells

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded after `setup`: required for deferred modules, whose shards have no values."""
        if self._deferred is not None:
            # stored in setup: a pipeline has freed values since then
            return self._deferred
        return self.lightning_module is not None and is_deferred(self.lightning_module)

    # --- life-cycle ---

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        end_as_ours(self._launcher)
        # not earlier: the Trainer rejects a plugin if the strategy has one already
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()

    def setup_environment(self) -> None:
        """Connect the processes; all ranks continue the random streams of rank 0, which match those of a plain run."""
        drawn = random_streams(self.root_device)
        with self._failures.starting():
            super().setup_environment()
            self._failures.connected()
        let_segments_grow(self.root_device)
        # DDPStrategy reseeds the streams; a plain run does not, and uses them for shuffling
        set_random_streams(self.broadcast(drawn) if self.world_size > 1 else drawn, self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Make the ranks equal, plan, install the plan, and create the optimisers last."""
        # imported late: it imports every technique, which creating a Trainer does not need
        from lightning_amp.lightning.strategy.install_parts import check_split, shard_fully, share_statistics

        assert self.accelerator is not None, "the Trainer sets the accelerator before setup"
        module = self.lightning_module
        assert self.model is not None, "the Trainer sets the model before setup"
        assert module is not None, "the Trainer sets the module before setup"
        self._remove_installed()
        trainer._data_connector.__class__ = CellOrder
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        fn, self._deferred = trainer.state.fn, is_deferred(self.model)
        if self._deferred:
            # registered first: Lightning moves the module to the CPU, also if the check raises
            self._undo.append(partial(without_memory, self.model, self.root_device))
            check_deferred(self.model)
        else:
            # one that does not fit stays on the host until its plan has split it
            waits = self.world_size == 1 and not has_room(self.root_device, self.model)
            if not waits:
                self.model_to_device()
            any_rank = partial(self.reduce_boolean_decision, all=False)
            check_replicas(self.model, rank=self.global_rank, broadcast=self.broadcast, any_rank=any_rank)
            broadcast_module(self.model)
        # before optimisers exist: they must receive the parameters that the plan installs
        rescue = self._plan_and_install(trainer, self.model)
        plan, mesh = self.plan, self.mesh
        assert plan is not None, "made before it was installed"
        if self._deferred:
            check_split(plan, fn)
            without_memory(self.model, self.root_device)
        elif waits and any(map(splits_on_host, plan.rules)):
            all_but_parameters_to(self.root_device, self.model)
        elif waits:
            self.model_to_device()
        if fn == TrainerFn.FITTING:
            self.model = share_statistics(plan, self.model, mesh, self._layer_sync, self._undo)
        # 1 if gradients are averaged over the model axis too
        inner = self.world_size // plan.gradient_ranks
        averaging, groups_of = self._mesh_of(inner)["data"], partial(self._mesh_of, inner)
        self._shards = shard_fully(plan, self.model, averaging, groups_of, self._shards, fn, self._undo)
        if fn == TrainerFn.FITTING:
            # after sharding: gradient hooks are registered where gradients are accumulated
            self._step = TrainingStep(
                module,
                self.model,
                mesh,
                self.root_device,
                precision=self.precision_plugin,
                shards=self._shards,
                bucket_bytes=int(self.request.bucket_mb * MIB),
                check_finite=self.request.check_finite,
                own_statistics=self.own_statistics,
                over_model=bool(technique_of_steps(plan.strategies)),
            )
            self.setup_optimizers(trainer)
            # registered one by one, because each call may raise
            self._undo.append(self._shards.watch(trainer))
            self._undo.append(time_steps(trainer, self.plan))
            self._undo.append(leave_out_flops(trainer))
            self._undo.append(rescue(self._step))
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING and not self._shards.on_host:
            optimizers_to_device(self.optimizers, self.root_device)

    def _plan_and_install(self, trainer: Trainer, model: nn.Module) -> Callable[..., Callable[[], None]]:
        # imported late: it imports the reference model and every technique, which creating a Trainer does not need
        from lightning_amp.lightning.profiling.loaders import forget_loaders
        from lightning_amp.lightning.strategy.install_plan import InstalledPlan

        named = ExitStack()
        named.enter_context(named_blocks(model, self.request.blocks))
        self._undo.append(named.close)
        # without this, `_model_ranks` would read the previous run's plan during planning
        trained, self.plan = self.plan, None
        planned = InstalledPlan(self, trainer, model, trained=trained)
        self._undo.append(partial(forget_loaders, trainer))
        # registered before installing: an install that raises is undone too
        self._undo.append(planned.undo)
        # planning counts fake tensors on the host with the settings of the device
        there = settings_of(self.root_device.type)
        self._shards = there(planned.install)()
        return there(planned.rescue)

    def _remove_installed(self) -> None:
        """Restore the module; no collectives, because other ranks may have stopped."""
        while self._undo:
            self._undo.pop()()
        if self._step is not None:
            self._step.remove()
        self._step, self._shards = None, Shards()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy (`deepcopy`, `torch.save` of a Trainer), without the step and the undo list."""
        return {**super().__getstate__(), "_undo": [], "_step": None, "pipelined_steps": None}

    def teardown(self) -> None:
        """Gather full parameters, undo what was installed, then run Lightning's teardown."""
        trainer = trainer_of(self.lightning_module)
        try:
            if trainer is not None:
                self._shards.give_back(self.optimizers, complete=not trainer.interrupted)
        finally:
            # also if gathering raises: the module's own methods must not stay replaced
            try:
                self._remove_installed()
            finally:
                self._deferred = None
                with self._failures.teardown():
                    super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Add the predicted memory to an out-of-memory error; then report the failure, also to the other ranks."""
        if is_out_of_memory(exception):
            explain(exception, self.plan, self)
        super().on_exception(exception)
        self._failures.tell(exception)

    def on_validation_start(self) -> None:
        """Make the ranks evaluate one model: buffers that differ after training become those of rank 0."""
        self._compare_ranks()
        if self._step is not None and self.model is not None and self.data_parallel_size > 1:
            take_buffers_of_first(self.model, self.mesh["data"].get_group())

    def on_train_end(self) -> None:
        """Compare the ranks once more, because the run may not have validated or saved anything."""
        self._compare_ranks()

    def _compare_ranks(self) -> None:
        module, trainer = self.lightning_module, trainer_of(self.lightning_module)
        if self._step is None or module is None or trainer is None or trainer.interrupted:
            return
        warn_of_differences(
            module,
            self._shards.sharded,
            self.mesh,
            step=trainer.global_step,
            model_ranks_differ=self._shards.model_ranks_differ,
            groups=self._shards.groups,
        )

    # --- a step ---

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's training step."""
        step = super().training_step
        return step(*args, **kwargs) if self._step is None else self._step.forward(step, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiate the mean loss over the cells of all ranks; outside a fit the rank's own loss, as DDP does."""
        if self._step is None:
            self._shards.refuse_backward()
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        return self._step.backward(closure_loss, optimizer, *args, **kwargs)

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients in training, as used for clipping; all ranks must call it."""
        return self._shards.gradient_norm()

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Accumulate gradients without averaging; the next backward pass outside the context averages their sum."""
        return nullcontext() if self._step is None else self._step.unreduced()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step on averaged gradients; a SIGTERM after parameters may have changed is raised at the end of the step."""
        plain = super().optimizer_step

        def step(closure: Callable[[], Any]) -> Any:
            if self._step is not None:
                closure = self._step.averaging(closure, optimizer, mean=self.reduce)
            return plain(optimizer, closure, model, **kwargs)

        return self._failures.whole_step(step, closure)
