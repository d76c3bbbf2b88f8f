"""Define `lightning_amp.profile` and `lightning_amp.plan`, for data directories and for any LightningModule."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from lightning_amp.costs.device_rates import CPU_CORE, Rates, products_under, rates_for
from lightning_amp.costs.model_shape import LATENT_DIM, profile_of_module
from lightning_amp.costs.ordered_runs import speeds_of_ranks
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.planning.base.plan_request import PlanRequest, check_request
from lightning_amp.planning.modules.plan_module import Counted
from lightning_amp.planning.plan.plan import Plan

# registers how profiles and plans are printed
from lightning_amp.planning.reports import module_report, plan_report  # noqa: F401
from lightning_amp.profiling.profile import Profile
from lightning_amp.profiling.read_profile import Attention
from lightning_amp.profiling.read_profile import profile as profile_data
from lightning_amp.quantities import memory_of_ranks
from lightning_amp.techniques.table import parse_strategies

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_amp.lightning.profiling.module_plan import ModulePlan

NOT_LOOKED_FOR = (
    "of a profile alone, chunk, logits, pipeline and replay are not looked for, so that less memory may be enough;"
    " lightning_amp.plan(module, batch) looks for them"
)


@overload
def profile(what: str | Path, *, setting: str | None = None, attention: Attention | None = None) -> Profile: ...


@overload
def profile(what: "LightningModule", batch: Any, *, batch_size: int | None = None) -> ModuleProfile: ...


def profile(
    what: Any,
    batch: Any = None,
    *,
    batch_size: int | None = None,
    setting: str | None = None,
    attention: Attention | None = None,
) -> Any:
    """Profile a data directory, or a training step of a module.

    Args:
        what: The path of a data directory; or any LightningModule, whose parameters may be on the device "meta".
        batch: For a module: an example of the batch of its `training_step`, or its shapes as text, such as "4x128",
            "4x3x32x32,4:int64" or "ids=4x128:int64".
        batch_size: For a module: profile a batch of this length instead of the example's.
        setting: For a directory: the setting to read, if the directory holds several.
        attention: For a directory: whether the Hi-C decoder builds its keys with attention; "full" means attention
            to all anchors.

    Returns:
        A Profile of the directory, or a ModuleProfile; `print` shows its report, and `lightning_amp.plan` plans by it.

    Raises:
        DataError: The directory or one of its files cannot be read.
        ModelError: The module's step fails, there is no batch, or `what` is neither a path nor a LightningModule.
        PlanError: An argument for directories was passed with a module, or one for modules with a directory.
    """
    if isinstance(what, str | Path):
        _refuse("a directory, which has no training step", batch=batch, batch_size=batch_size)
        return profile_data(what, setting=setting, attention=attention)
    what = _of_compiled(what)
    if batch is None:
        raise ModelError(
            f"profiling {type(what).__name__!r} requires a batch, an example of what its training_step receives:"
            " lightning_amp.profile(module, batch)"
        )
    _refuse("a module, which is not read from a directory", setting=setting, attention=attention)
    # imported here, so that a directory is profiled without loading torch
    from lightning_amp.data.batch import batch_of_shapes
    from lightning_amp.footprint.chain.chain_of import count_step
    from lightning_amp.installing.describe_module import describe
    from lightning_amp.lightning.profiling.facts_of_step import facts_of_step, refused_techniques
    from lightning_amp.techniques.data.batch_norm import statistics_bytes
    from lightning_amp.techniques.data.gradient_sync import gradient_sizes

    if isinstance(batch, str):
        batch = batch_of_shapes(batch)
    step = count_step(what, batch, (), batch_size=batch_size)
    seen = ProfiledStep(
        profile=step.profile,
        chain=step.chain,
        own_checkpoints=step.own_checkpoints,
        rates=CPU_CORE,
        gradient_sizes=gradient_sizes(what.parameters()),
        facts=dict(facts_of_step(what, step)),
        refused=dict(refused_techniques(what, step, values=False)),
        statistics_bytes=statistics_bytes(what),
    )
    shape = replace(describe(what, batch_size=step.profile.batch_size or 1), profiled=True)
    return replace(step.profile, counted=Counted(seen=seen, shape=shape))


@overload
def plan(
    what: Profile | ModuleProfile,
    *,
    devices: int = 1,
    device_memory: str | int | Sequence[str | int] | None = None,
    policy: str = "auto",
    strategies: str | list[str] | tuple[str, ...] | None = "auto",
    batch_size: int | None = None,
    model_parallel_size: int | str = "auto",
    latent_dim: int | None = None,
    window: int | None = None,
    rates: Rates | str | None = None,
    device_speeds: Sequence[float] | None = None,
    node_devices: int | None = None,
) -> Plan: ...


@overload
def plan(
    what: "LightningModule",
    batch: Any,
    *,
    devices: int = 1,
    device_memory: str | int | Sequence[str | int] | None = None,
    policy: str = "auto",
    strategies: str | list[str] | tuple[str, ...] | None = "auto",
    batch_size: int | None = None,
    model_parallel_size: int | str = "auto",
    rates: Rates | str | None = None,
    device_speeds: Sequence[float] | None = None,
    node_devices: int | None = None,
    precision: str | int | None = None,
    blocks: Sequence[type | str] | None = None,
    host_memory: str | int | None = None,
    compile: Literal["auto"] | bool = False,
) -> "ModulePlan": ...


def plan(
    what: Any,
    batch: Any = None,
    *,
    devices: int = 1,
    device_memory: str | int | Sequence[str | int] | None = None,
    policy: str = "auto",
    strategies: str | list[str] | tuple[str, ...] | None = "auto",
    batch_size: int | None = None,
    model_parallel_size: int | str = "auto",
    latent_dim: int | None = None,
    window: int | None = None,
    rates: Rates | str | None = None,
    device_speeds: Sequence[float] | None = None,
    node_devices: int | None = None,
    precision: str | int | None = None,
    blocks: Sequence[type | str] | None = None,
    host_memory: str | int | None = None,
    compile: Literal["auto"] | bool = False,
) -> Any:
    """Decide what to install, without training and without starting ranks.

    Args:
        what: Any LightningModule; or what `lightning_amp.profile` returns, of a data directory or of a module.
        batch: For a module: an example of the batch of its `training_step`, or its shapes as text, as for `profile`.
        devices: Number of ranks on all nodes together.
        device_memory: Budget of one device, a number of bytes or a text such as "24GiB"; None takes the memory of the
            GPU that `rates` names, and means unknown without one. A list has one entry per device: each stage is
            planned for the memory of its device; other plans use the minimum. Of a GPU it is what a process takes, with
            CUDA's context and fragments; without a GPU in `rates` it is that of tensors.
        policy: "auto" takes the fastest plan that fits, "paper" AMP's fixed mapping.
        strategies: Techniques to use instead of the policy's choice; they are checked and predicted as well. "auto"
            and None leave it to the policy.
        batch_size: For a directory: cells per rank and modality, by default 64. For a module with a batch: plan for
            this batch length. Not for a module's profile, which has a batch length already.
        model_parallel_size: Ranks of the model axis, or "auto".
        latent_dim, window: For a directory: options of the reference model; None means the default.
        rates: For a directory or a module: rates of one device, to predict times, or the name of a device, such as
            "A100" or "A100-80GB"; None means one CPU core.
        device_speeds: Speed of every device in any unit, such as (1, 1, 0.5), by which they get stages and strata as
            in a fit with `AMPStrategy(device_speeds=...)`; None means equal speeds.
        node_devices: For a directory or a module and a batch: devices of one node; the model axis stays inside a node
            unless `model_parallel_size` is larger. None means that all devices are on one node.
        precision: For a module: precision of the Trainer, such as "bf16-mixed"; None means "32-true". Operators are
            cast as by autocast of the device that runs the planner: on a CPU a copy of the logits is kept, on a GPU
            not.
        blocks: For a module and a batch: classes, their import paths, or names or patterns of the submodules that are
            blocks, as for `AMPStrategy`.
        host_memory: For a module and a batch: most bytes of host memory of a rank; None means any.
        compile: For a module and a batch: as for `AMPStrategy`; with "auto" for a long run.

    Returns:
        The plan; `print` shows its report. For a module, a ModulePlan with the methods `largest_batch` and
        `fewest_devices` and the Plan as `plan`. For a module's profile, a Plan for which chunk, logits, pipeline and
        replay were not considered.

    Raises:
        ModelError: The module's step fails, or the module cannot be copied.
        PlanError: An argument is not allowed, or this number of devices cannot run the strategies.
    """
    strategies = None if strategies == "auto" else strategies
    reached = rates or CPU_CORE
    if isinstance(reached, str):
        reached = rates_for(reached, products=products_under(str(precision or "32-true")))
    request: dict[str, Any] = {
        "devices": devices,
        "device_memory": device_memory,
        "policy": policy,
        "strategies": strategies,
        "model_parallel_size": model_parallel_size,
    }
    of_module = {"blocks": blocks, "host_memory": host_memory, "compile": compile or None}
    for name, value in of_module.items():
        if value is not None and batch is None:
            raise PlanError(f"{name}={value!r} requires a module and a batch; leave it out")
    if isinstance(what, Profile):
        _refuse("a directory's profile, whose plan is one of float32", batch=batch, precision=precision)
        batch_size = 64 if batch_size is None else batch_size
        check_request(**request, batch_size=batch_size)
        from lightning_amp.simulation.plan_of_data import plan_of_data

        return plan_of_data(
            what,
            request | {"node_devices": node_devices, "device_speeds": device_speeds},
            batch_size=batch_size,
            latent_dim=LATENT_DIM if latent_dim is None else latent_dim,
            window=window,
            rates=reached,
        )
    if batch is not None:
        _refuse("a module and a batch, whose structure is the module's", latent_dim=latent_dim, window=window)
        what = _of_compiled(what)
        from lightning_amp.data.batch import batch_of_shapes
        from lightning_amp.footprint.run.run_settings import UNDER_AMP
        from lightning_amp.lightning.profiling.plan_of_module import plan_of_module

        return plan_of_module(
            what,
            batch_of_shapes(batch) if isinstance(batch, str) else batch,
            run_settings=UNDER_AMP if precision is None else replace(UNDER_AMP, precision=str(precision)),
            rates=reached,
            request=request | {"node_devices": node_devices, "device_speeds": device_speeds},
            options=of_module,
            batch_size=batch_size,
        )
    counted = getattr(what, "counted", None)
    if not isinstance(counted, Counted):
        raise PlanError(
            f"cannot plan a {type(what).__name__!r}; pass a module and a batch, lightning_amp.plan(module, batch),"
            " or what lightning_amp.profile(DIR) or lightning_amp.profile(module, batch) returned"
        )
    _refuse(
        "the profile of a module's step, which has what it was counted with",
        batch_size=batch_size,
        latent_dim=latent_dim,
        window=window,
        rates=rates,
        node_devices=node_devices,
        precision=precision,
    )
    made = _of_count(counted, **request, device_speeds=device_speeds)
    return replace(made, notes=(*made.notes, NOT_LOOKED_FOR))


def _of_count(
    counted: Counted,
    *,
    devices: int,
    device_memory: Any,
    policy: str,
    strategies: Any,
    model_parallel_size: int | str,
    device_speeds: Any,
) -> Plan:
    """Plan a step by its profile alone."""
    from lightning_amp.lightning.profiling.make_step_plan import make_step_plan

    if decoder := counted.shape.decoder:
        raise PlanError(
            f"cannot plan this module by its profile alone: {decoder.fqn!r} is a decoder of strata, with whose"
            " techniques the step is counted; give both: lightning_amp.plan(module, batch)"
        )
    given = PlanRequest(
        data=profile_of_module(counted.shape),
        shape=counted.shape,
        rates=counted.seen.rates,
        devices=devices,
        memory=() if device_memory is None else memory_of_ranks(device_memory, devices),
        memory_named=device_memory is not None,
        policy=policy,
        strategies=None if strategies is None else parse_strategies(strategies),
        model_parallel_size=model_parallel_size,
        speeds=speeds_of_ranks(device_speeds, devices),
    )
    return make_step_plan(given, None, counted.seen).plan


def _of_compiled(what: Any) -> Any:
    """Return the LightningModule in what `torch.compile` returned for one, as a Trainer does; else the argument."""
    inner = getattr(what, "_orig_mod", None)
    if inner is None or vars(inner).get("_compiler_ctx"):
        return inner or what
    from lightning.pytorch.utilities.compile import from_compiled

    return from_compiled(what)


def _refuse(what: str, **given: Any) -> None:
    """Raise a PlanError for options that do not apply to the object to be planned."""
    if names := [name for name, value in given.items() if value is not None]:
        raise PlanError(
            f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} given with {what}; leave"
            f" {'it' if len(names) == 1 else 'them'} out"
        )
