"""The profile of a module's training step as text of at most 80 columns."""

from lightning_amp.footprint.module_profile import KINDS, ModuleProfile
from lightning_amp.planning.reports.plan_report import table
from lightning_amp.quantities import format_bytes

SHOWN = 8
"""Modules and tensors in the text: the largest."""
PARTS_IN_WORDS = {
    "parameters": "parameters, gradients and optimiser state",
    "head": "logits and loss",
    "tensor": "one tensor",
    "saved": "what is saved for the backward pass",
}


def module_report(profile: ModuleProfile) -> str:
    """Kinds at the peak, largest modules, largest tensors."""
    peak = profile.peak_bytes

    def share(n_bytes: int) -> list[str]:
        return [format_bytes(n_bytes), f"{100 * n_bytes / max(1, peak):.0f} %"]

    size = "" if profile.batch_size is None else f", batch of {profile.batch_size:,}"
    where = f" of {profile.peak_module}" if profile.peak_module else ""
    kinds = [[*share(profile.by_kind[kind]), kind] for kind in KINDS]
    modules = [[*share(row.n_bytes), row.fqn or "(the module itself)"] for row in profile.modules[:SHOWN]]
    tensors = [
        [
            *share(row.n_bytes),
            f"{list(row.shape)} {row.dtype}",
            f"{row.fqn}: {row.name}" if row.fqn else row.name,
        ]
        for row in profile.tensors[:SHOWN]
    ]
    texts = [
        f"peak of a training step: {format_bytes(peak)} in the {profile.peak_phase} pass{where}{size}",
        f"largest part: {PARTS_IN_WORDS[profile.largest]} ({profile.largest}),"
        f" {' = '.join(share(profile.parts[profile.largest]))}",
        f"\n{table(['bytes', 'share', 'kind at the peak'], kinds)}",
        f"\n{table(['bytes', 'share', 'largest modules'], modules)}",
        f"\n{table(['bytes', 'share', 'shape', 'largest tensors'], tensors)}",
        f"\ncounted on {profile.measured}{_because(profile)}",
    ]
    return "\n".join(texts)


def _because(profile: ModuleProfile) -> str:
    return (
        f", because the step needs values ({profile.reason.partition(chr(10))[0]:.80})"
        if profile.reason
        else ""
    )
