"""`lightning_amp.profile` and `lightning_amp.plan`: of a data directory, or of any module's training step."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from lightning_amp.errors import ModelError, PlanError
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.planning.modules.plan_step import Counted, plan_step
from lightning_amp.planning.modules.seen import Seen
from lightning_amp.planning.plan.model_shape import ModelShape
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan as plan_data

# what a profile and a plan print as
from lightning_amp.planning.time.device_rates import CPU_CORE, Rates
from lightning_amp.profiling.profile import Profile
from lightning_amp.profiling.read_profile import Attention
from lightning_amp.profiling.read_profile import profile as profile_data

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

NOT_LOOKED_FOR = (
    "of a profile alone, chunks and stages are not looked for; a fit does, and lightning-amp plan --config"
)


@overload
def profile(
    what: str | Path, *, setting: str | None = None, attention: Attention | None = None
) -> Profile: ...


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
        batch: For a module: an example of what its `training_step` gets.
        batch_size: For a module: profile a batch of this length instead of the example's.
        setting: For a directory: which files to take where it holds several settings.
        attention: For a directory: whether the Hi-C decoder builds its keys with attention; "full" for that to all
            anchors.

    Returns:
        A Profile of the directory, or a ModuleProfile; `print` shows its report, and `lightning_amp.plan` plans by it.

    Raises:
        DataError: The directory or one of its files cannot be read.
        ModelError: The module's step fails, there is no batch, or `what` is neither a path nor a LightningModule.
    """
    if isinstance(what, str | Path):
        return profile_data(what, setting=setting, attention=attention)
    if batch is None:
        raise ModelError(
            f"a profile was asked for of {type(what).__name__!r}, without a batch; give an example of what its"
            " training_step gets: lightning_amp.profile(module, batch)"
        )
    # torch is loaded here: a directory is profiled without it
    from lightning_amp.footprint.chain.chain_of import count_step
    from lightning_amp.lightning.first_look.step_of_module import refused_techniques
    from lightning_amp.parallel.describe_module import describe
    from lightning_amp.parallel.fsdp.units import units_of
    from lightning_amp.parallel.s1_data.batch_norm import statistics_bytes

    step = count_step(what, batch, (), batch_size=batch_size)
    seen = Seen(
        profile=step.profile,
        chain=step.chain,
        units=units_of(what),
        rates=CPU_CORE,
        no_stages=NOT_LOOKED_FOR,
        refused=refused_techniques(what, step, values=False),
        statistics_bytes=statistics_bytes(what),
    )
    shape = replace(describe(what, batch_size=step.profile.batch_size or 1), profiled=True)
    return replace(step.profile, counted=Counted(seen=seen, shape=shape))


def plan(
    profile: Profile | ModuleProfile,
    *,
    devices: int = 1,
    device_memory: str | int | None = None,
    policy: str = "auto",
    strategies: str | list[str] | tuple[str, ...] | None = None,
    batch_size: int | None = None,
    model_parallel_size: int | str = "auto",
    shape: ModelShape | None = None,
    rates: Rates | None = None,
    node_devices: int | None = None,
) -> Plan:
    """Decide what to install.

    Args:
        profile: Of a data directory, or of a module's training step as `lightning_amp.profile(module, batch)` makes it.
        devices: Ranks in all, over all nodes.
        device_memory: Budget of one device, a number of bytes or a text such as "24GiB"; None means unknown.
        policy: "auto" takes the fastest plan that fits, "paper" AMP's fixed mapping.
        strategies: The user's own choice from the library instead of the policy's; still checked and predicted.
        batch_size: For a directory: cells per rank and modality, by default 64. A module's profile has its own.
        model_parallel_size: Ranks of the model axis, or "auto".
        shape: For a directory: the model; None means the reference model with its default sizes.
        rates: For a directory: what one device reaches, for the predicted times; None is one core of a CPU, as for a
            module.
        node_devices: For a directory: devices of one node; the model axis stays inside it unless `model_parallel_size`
            is longer. None when all devices are on one node.

    Returns:
        The plan; `print` shows its report. Of a module, chunks and stages are not looked for: a fit does, and
        `lightning-amp plan --config`.

    Raises:
        PlanError: A request outside what is allowed, or strategies that this number of devices cannot run.
    """
    if isinstance(profile, Profile):
        return plan_data(
            profile,
            devices=devices,
            device_memory=device_memory,
            policy=policy,
            strategies=strategies,
            batch_size=64 if batch_size is None else batch_size,
            model_parallel_size=model_parallel_size,
            shape=shape,
            rates=CPU_CORE if rates is None else rates,
            node_devices=node_devices,
        )
    counted = getattr(profile, "counted", None)
    if not isinstance(counted, Counted):
        raise PlanError(
            f"a plan was asked for of a {type(profile).__name__!r} that has no blocks; give what"
            " lightning_amp.profile(DIR) or lightning_amp.profile(module, batch) returns"
        )
    given = {"batch_size": batch_size, "shape": shape, "rates": rates, "node_devices": node_devices}
    if of_data := [name for name, value in given.items() if value is not None]:
        raise PlanError(
            f"{', '.join(of_data)} {'was' if len(of_data) == 1 else 'were'} given beside the profile of a module's"
            " step, which has what it was counted with; leave it out, or profile the module anew"
        )
    made = plan_step(
        counted,
        devices=devices,
        device_memory=device_memory,
        policy=policy,
        strategies=strategies,
        model_parallel_size=model_parallel_size,
    )
    return replace(made, notes=(*made.notes, NOT_LOOKED_FOR))
