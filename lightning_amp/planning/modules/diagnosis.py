"""Diagnose what holds the peak of a module's step, as signals with evidence.

    LARGE_PARAMETERS      parameters, gradients, optimiser state       a third of the peak, or its largest part
    ONE_LARGE_TENSOR      one tensor, with those of its shape that its module makes               the same
    MANY_SAVED_TENSORS    what else is saved for the backward pass                                the same
    LARGE_HEAD            logits, and what the loss makes of them                                 the same

Which techniques help is found by predicting the peak with each of them (techniques.py): one helps that takes `WORTH` of
the peak away. Of those that do not, what stands in the way is said: the part of the peak that they leave as it is.
"""

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.footprint.module_profile import ACTIVATIONS, PHASES, ModuleProfile
from lightning_amp.planning.modules.candidates import advice
from lightning_amp.planning.plan.module_diagnosis import ModuleDiagnosis
from lightning_amp.quantities import format_bytes

SHARE = 1 / 3
"""Of the peak, from which on a part raises its signal."""
SHOWN = 8
"""Modules that a diagnosis names."""
SIGNALS = {
    "parameters": "LARGE_PARAMETERS",
    "tensor": "ONE_LARGE_TENSOR",
    "saved": "MANY_SAVED_TENSORS",
    "head": "LARGE_HEAD",
}


def diagnose_module(
    seen: ProfiledStep,
    *,
    ranks: int = 1,
    budget: int | None = None,
    stages: Draft | None = None,
    compared: bool = False,
) -> ModuleDiagnosis:
    """What the profile says, and which techniques help; those that take seconds to look for, beyond a budget only, but
    for `stages` that are drafted already, or may be faster than plans that are `compared`.
    """
    profile = seen.profile
    helps, does_not_help = advice(seen, ranks=ranks, budget=budget, stages=stages, compared=compared)
    return ModuleDiagnosis(
        largest=profile.largest,
        evidence=(*evidence(profile), *where(profile)),
        helps=helps,
        does_not_help=does_not_help,
        peak_bytes=profile.peak_bytes,
        parts=dict(profile.parts),
        modules={row.fqn: row.n_bytes for row in profile.modules[:SHOWN]},
        measured=profile.measured,
        reason=profile.reason,
    )


def signals(profile: ModuleProfile) -> tuple[str, ...]:
    """Names of the raised signals."""
    return tuple(name for part, name in SIGNALS.items() if _raised(profile, part))


def evidence(profile: ModuleProfile) -> tuple[str, ...]:
    """One sentence per signal, raised or not: "MANY_SAVED_TENSORS: 5.31 MiB, 72 % of the peak, ..."."""
    return tuple(f"{name}: {_sentence(profile, part)}" for part, name in SIGNALS.items())


def where(profile: ModuleProfile) -> tuple[str, ...]:
    """Where in the step the peak is, and which module and tensor hold most of it."""
    at = f" of {profile.peak_module}" if profile.peak_module else ""
    said = [f"the peak of {format_bytes(profile.peak_bytes)} is in the {PHASES[profile.peak_phase]}{at}"]
    if profile.modules:
        most = profile.modules[0]
        said.append(f"{called(most.fqn)} holds most of it: {_part_of(profile, most.n_bytes)}")
    if profile.tensors:
        tensor = profile.tensors[0]
        said.append(
            f"the largest tensor is {tensor.name} of {called(tensor.fqn)}, {list(tensor.shape)} {tensor.dtype}:"
            f" {_part_of(profile, tensor.n_bytes)}"
        )
    return tuple(said)


def called(fqn: str) -> str:
    """A module's name, which is empty for the LightningModule itself."""
    return fqn or "the module itself"


def _raised(profile: ModuleProfile, part: str) -> bool:
    return part == profile.largest or profile.parts[part] >= SHARE * profile.peak_bytes


def _sentence(profile: ModuleProfile, part: str) -> str:
    size = _part_of(profile, profile.parts[part])
    kinds = profile.by_kind
    detail = {
        "parameters": "parameters {parameters}, gradients {gradients}, optimiser state {optimiser state}".format(
            **{kind: format_bytes(n_bytes) for kind, n_bytes in kinds.items()}
        ),
        "tensor": "the largest tensor that is no parameter, with those of its shape that its module makes",
        "saved": f"tensors of {_n_modules(profile)} that the forward pass leaves to the backward pass",
        "head": "logits, and what the loss makes of them",
    }[part]
    sign = "more than a third" if _raised(profile, part) else "less than a third"
    sign = "the largest part" if part == profile.largest else sign
    return f"{size}, {detail} ({sign})"


def _n_modules(profile: ModuleProfile) -> str:
    n = sum(row.by_kind[ACTIVATIONS] > 0 for row in profile.modules)
    return "1 module" if n == 1 else f"{n} modules"


def _part_of(profile: ModuleProfile, n_bytes: int) -> str:
    return f"{format_bytes(n_bytes)}, {_percent(n_bytes, profile)} of the peak"


def _percent(n_bytes: int, profile: ModuleProfile) -> str:
    return f"{100 * n_bytes / max(1, profile.peak_bytes):.0f} %"
