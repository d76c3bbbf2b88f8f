"""Refuse modules that `fully_shard` cannot split, or cannot split exactly, before anything is split."""

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_amp._torch import is_compiled
from lightning_amp.errors import InstallError
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.contract.sharded_parameter import is_split

LEAVE_OUT = "or leave fsdp out"
SWAPPED = (
    "the block {!r} is called with other parameters than its own (torch.func.functional_call), in whose place fsdp"
    " would gather its own: train with strategies='S1'"
)


def refuse(module: nn.Module, units: Mapping[str, nn.Module], *, by_hand: bool = True, values: bool = True) -> None:
    """Refuse, with an InstallError, a module that cannot be split; it is unchanged.

    Args:
        module: Whole.
        units: Its blocks that are gathered separately, by name.
        by_hand: Whether a step of manual optimisation can have the gradients of what is gathered.
        values: Whether parameters are to have their values by now; a plan needs none.
    """
    if not by_hand and getattr(module, "automatic_optimization", True) is False:
        raise InstallError(
            f"fsdp_offload=True is not supported: {type(module).__name__!r} has"
            " automatic_optimization=False; while its step runs parameters are on the device and their"
            " gradients in the host's memory, where a step by hand would not find them: let the Trainer"
            " optimise, or leave fsdp_offload out"
        )
    _refuse_modules(module)
    for name, parameter in module.named_parameters():
        found = _problem(parameter, values=values)
        if found:
            raise InstallError(f"fsdp cannot split the parameter {name!r} over the ranks, which {found}, {LEAVE_OUT}")
    taken: set[int] = set()
    for fqn, unit in (*units.items(), ("", module)):
        own = [p for p in unit.parameters() if id(p) not in taken and p.dim()]
        taken |= {id(p) for p in own}
        dtypes = {str(p.dtype).removeprefix("torch.") for p in own if p.requires_grad}
        if len(dtypes) > 1:
            where = f"of the block {fqn!r}" if fqn else "outside of blocks"
            raise InstallError(
                f"fsdp adds up the gradients {where} together, and they have the types {sorted(dtypes)!r}; give them"
                f" one type, {LEAVE_OUT}"
            )


def _refuse_modules(module: nn.Module) -> None:
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
    if compiled := [name for name, child in module.named_modules() if is_compiled(child)]:
        raise InstallError(
            f"fsdp is not supported: torch.compile was applied to {compiled!r}, which has not been tested"
            f" together; leave torch.compile out, {LEAVE_OUT}"
        )


def _problem(parameter: Tensor, *, values: bool) -> str:
    """What a person can do about a parameter that cannot be split, after "which"; "" where it can be."""
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    if is_split(parameter):
        return "is a DTensor already: give the module whole parameters"
    if values and parameter.is_meta:
        return "has no values (device 'meta'): make it in configure_model, or before"
    if parameter.is_complex():
        return "is complex: its rows would not be updated as the whole is by Adam; keep its real and imaginary parts"
    if not parameter.is_contiguous():
        return f"has the strides {parameter.stride()!r} and is not contiguous: make it so in the module's constructor"
    if hooks and parameter.dim():
        return "has hooks, which would see a rank's rows or nothing: take them off"
    return ""
