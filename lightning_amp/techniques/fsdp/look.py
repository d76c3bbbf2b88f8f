"""Read from a module, and from its counted step, whether fsdp can train it."""

from lightning.pytorch import LightningModule

from lightning_amp.errors import InstallError
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.footprint.find_blocks import blocks_with_own_parameters
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterUnit
from lightning_amp.techniques.fsdp.refusals import SWAPPED, refuse
from lightning_amp.techniques.fsdp.units import units_of


def read_step(module: LightningModule, step: CountedStep) -> tuple[ParameterUnit, ...]:
    """The units of a module: blocks of which the step reads parameters outside of their calls are left to the root."""
    return units_of(module, apart=step.read_outside)


def refusal(module: LightningModule, step: CountedStep, *, values: bool) -> str:
    """Why fsdp cannot train this module; "" where it can."""
    units = blocks_with_own_parameters(module)
    try:
        refuse(module, units, values=values)
    except InstallError as error:
        return str(error)
    for unit in units:
        if unit in step.swapped:
            return SWAPPED.format(unit)
    for unit in units:
        if any(f"{fqn}.".startswith(f"{unit}.") for fqn in step.went_back):
            return (
                "the step takes gradients while it runs (torch.autograd.grad, as for a gradient penalty, or"
                f" torch.func), for which the parameters of {unit!r} would have to be gathered once more: train with"
                " strategies='S1', or, where it is loss.backward(), call self.manual_backward(loss)"
            )
    return ""
