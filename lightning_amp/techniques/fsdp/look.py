"""Group a module's parameters into units that are gathered together, and check that fsdp can train the module exactly.

A unit has the parameters of a block, the root all others. A block is a unit if nothing else uses its parameters:
tied parameters (embedding and head) would have to be gathered for both, so such a block belongs to the root, which is
gathered for the full step. The same holds for a block inside another one, and for a block whose parameters a step
reads without calling it. Parameters of 0 dimensions cannot be sharded; they are replicated, and averaged as under S1.
"""

from collections.abc import Collection, Mapping, Sequence
from dis import get_instructions
from fnmatch import fnmatchcase
from types import FunctionType

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_amp._torch import is_wrapped
from lightning_amp.errors import InstallError
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.footprint.find_blocks import blocks_with_own_parameters
from lightning_amp.techniques.contract.change import hooks_of
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.contract.sharded_parameter import is_split
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterShape, ParameterUnit

LEAVE_OUT = "or leave fsdp out"
SWAPPED = (
    "the block {!r} is called with other parameters than its own (torch.func.functional_call), in whose place fsdp"
    " would gather its own: train with strategies='S1'"
)
WRITTEN = (
    "under fsdp a block writes in place into a tensor that it is called with, which torch does not support: write"
    " into a copy, as by x = x * 2 instead of x.mul_(2), or train with strategies='S1'"
)
COPIED = (
    "the step makes a copy of the block {!r} (copy.deepcopy), which would have a rank's rows of its parameters: make"
    " the copy in __init__, or train with strategies='S1'"
)


def refuse(module: nn.Module, units: Mapping[str, nn.Module], *, by_hand: bool = True, values: bool = True) -> None:
    """Raise an InstallError for a module that cannot be sharded; the module does not change.

    Args:
        module: Module with full parameters.
        units: Its blocks that are gathered separately, by name.
        by_hand: Whether a step with manual optimisation can have the gradients of gathered parameters.
        values: Whether parameters must have values already; a plan needs none.
    """
    if not by_hand and getattr(module, "automatic_optimization", True) is False:
        raise InstallError(
            f"fsdp_offload=True is not supported: {type(module).__name__!r} has"
            " automatic_optimization=False; while its step runs parameters are on the device and their"
            " gradients in the host's memory, where a step by hand would not find them: let the Trainer"
            " optimise, or leave fsdp_offload out"
        )
    if decoders := sorted(find_decoders(module)):
        raise InstallError(
            f"fsdp does not support the decomposed decoder {decoders[0]!r}, whose strata are run in parts"
            " and not by their forward, so that nothing would gather their parameters; use S2, strata or"
            " nodes for it"
        )
    if sparse := [name for name, child in module.named_modules() if getattr(child, "sparse", False) is True]:
        raise InstallError(
            f"fsdp is not supported: {sparse!r} have sparse gradients, which cannot be added up in parts;"
            f" make them dense (sparse=False), {LEAVE_OUT}"
        )
    if compiled := [name for name, child in module.named_modules() if is_wrapped(child)]:
        raise InstallError(
            f"fsdp is not supported: torch.compile was applied to {compiled!r}, which has not been tested"
            f" together; leave torch.compile out, {LEAVE_OUT}"
        )
    for hook in ("on_after_backward", "on_before_optimizer_step"):
        function = getattr(type(module), hook, None)
        if not isinstance(function, FunctionType) or function.__globals__.get("grad_norm") is not grad_norm:
            continue
        if any((i.opname, i.argval) == ("LOAD_GLOBAL", "grad_norm") for i in get_instructions(function)):
            raise InstallError(
                f"fsdp is not supported: 'grad_norm' in {hook} of {type(module).__name__!r} takes norms of whole"
                " gradients, of which a rank has its rows; take self.trainer.strategy.gradient_norm(), which every"
                f" rank calls, {LEAVE_OUT}"
            )
    for name, parameter in module.named_parameters():
        found = _why_not_split(parameter, values=values)
        if found:
            raise InstallError(f"fsdp cannot split the parameter {name!r} over the ranks, which {found}, {LEAVE_OUT}")
    taken: set[int] = set()
    for fqn, unit in (*units.items(), ("", module)):
        own = [p for p in unit.parameters() if id(p) not in taken and p.dim()]
        taken |= {id(p) for p in own}
        # torch reduces all gradients of a unit in one buffer
        dtypes = {str(p.dtype).removeprefix("torch.") for p in own if p.requires_grad}
        if len(dtypes) > 1:
            where = f"of the block {fqn!r}" if fqn else "outside of blocks"
            raise InstallError(
                f"fsdp adds up the gradients {where} together, and they have the types {sorted(dtypes)!r}; give them"
                f" one type, {LEAVE_OUT}"
            )


def _why_not_split(parameter: Tensor, *, values: bool) -> str:
    """Describe why a parameter cannot be sharded and what to do, as the end of a message; "" if it can be sharded."""
    if is_split(parameter):
        return "is a DTensor already: give the module whole parameters"
    if values and parameter.is_meta:
        return "has no values (device 'meta'): make it in configure_model, or before"
    if parameter.is_complex():
        return "is complex: its rows would not be updated as the whole is by Adam; keep its real and imaginary parts"
    if not parameter.is_contiguous():
        return f"has the strides {parameter.stride()!r} and is not contiguous: make it so in the module's constructor"
    if parameter.dim() and not parameter.numel():
        return f"has the shape {tuple(parameter.shape)!r} and no element: leave it out of the module"
    if parameter.dim() and hooks_of(parameter):
        return "has hooks, which would see a rank's rows or nothing: take them off"
    return ""


def chosen_units(module: nn.Module, fqns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the units that match names or patterns, without the root; raises an InstallError for other names."""
    possible = blocks_with_own_parameters(module)
    for fqn in fqns:
        if fqn and not any(fnmatchcase(unit, fqn) for unit in possible):
            raise InstallError(
                f"fsdp cannot gather {fqn!r} separately: it is no block that has parameters itself; those of"
                f" {type(module).__name__} are {list(possible)!r}, and '' is the rest of it"
            )
    if "" not in fqns:
        raise InstallError(
            f"fsdp has rules for {list(fqns)!r} alone; it splits all parameters of a module: add a rule for"
            " '', which is what lies in no block"
        )
    return {unit: found for unit, found in possible.items() if any(fnmatchcase(unit, fqn) for fqn in fqns)}


def units_of(module: nn.Module, apart: Collection[str] = ()) -> tuple[ParameterUnit, ...]:
    """Return the units of a module with the sizes of parameters, the root last; blocks in `apart` are left out."""
    taken: set[int] = set()
    found = []
    blocks = {fqn: block for fqn, block in blocks_with_own_parameters(module).items() if fqn not in apart}
    for fqn, block in (*blocks.items(), ("", module)):
        prefix = f"{fqn}." if fqn else ""
        own = [(f"{prefix}{name}", p) for name, p in block.named_parameters() if id(p) not in taken]
        taken |= {id(p) for _, p in own}
        shapes = (
            ParameterShape(name=name, shape=tuple(p.shape), item_bytes=p.element_size(), trained=p.requires_grad)
            for name, p in own
            if p.dim()
        )
        found.append(ParameterUnit(fqn=fqn, parameters=tuple(shapes)))
    return tuple(found)


def read_step(module: LightningModule, step: CountedStep) -> tuple[ParameterUnit, ...]:
    """Return the units of a module; blocks whose parameters the step reads outside their calls belong to the root."""
    return units_of(module, apart=step.read_outside)


def refusal(module: LightningModule, step: CountedStep, *, values: bool) -> str:
    """Why fsdp cannot train this module; "" if it can."""
    units = blocks_with_own_parameters(module)
    try:
        refuse(module, units, values=values)
    except InstallError as error:
        return str(error)
    for unit in units:
        if unit in step.swapped | step.copied:
            return (COPIED if unit in step.copied else SWAPPED).format(unit)
    for unit in units:
        if any(f"{fqn}.".startswith(f"{unit}.") for fqn in step.went_back):
            return (
                "the step takes gradients while it runs (torch.autograd.grad, as for a gradient penalty, or"
                f" torch.func), for which the parameters of {unit!r} would have to be gathered once more: train with"
                " strategies='S1', or, where it is loss.backward(), call self.manual_backward(loss)"
            )
    return ""
