"""Format the profile and the diagnosis of a module's training step as text of at most 80 columns."""

from collections.abc import Sequence
from textwrap import fill, wrap

from lightning_amp.footprint.module_profile import KINDS, PHASES, ModuleProfile, TensorBytes
from lightning_amp.footprint.trace.allocator_settings import AllocatorSettings
from lightning_amp.footprint.trace.step_trace import StepTrace
from lightning_amp.planning.plan.plan import NEEDLESS, ModuleDiagnosis
from lightning_amp.quantities import format_bytes
from lightning_amp.text_table import WIDTH, table

SHOWN = 8
"""Number of modules and tensors in the text, largest first."""
PARTS_IN_WORDS = {
    "parameters": "parameters, gradients and optimiser state",
    "head": "logits and loss",
    "tensor": "one tensor",
    "saved": "what is saved for the backward pass",
}


def diagnosis_sections(diagnosis: ModuleDiagnosis) -> list[str]:
    """Return the sections on the peak, its largest modules, and the effect of every technique."""
    first = (
        f"the step as it is: {format_bytes(diagnosis.peak_bytes)}, counted on {diagnosis.measured}; the largest part is"
        f" {PARTS_IN_WORDS[diagnosis.largest]}"
    )
    rows = [
        [format_bytes(size), f"{100 * size / max(1, diagnosis.peak_bytes):.0f} %", fqn or "(the module itself)"]
        for fqn, size in diagnosis.modules.items()
    ]
    sections = ["\n".join(wrap(first, WIDTH)), table(["bytes", "share", "modules at the peak"], rows)]
    return [*sections, *filter(None, [advice_table(diagnosis)])]


def advice_table(diagnosis: ModuleDiagnosis) -> str:
    """Return a table of every technique and its effect; "" if there is none."""
    advice = [[name, "helps", alone(name, text)] for name, text in diagnosis.helps.items()]
    for name, text in diagnosis.does_not_help.items():
        advice.append([name, "not tried" if text == NEEDLESS.format(name) else "does not", alone(name, text)])
    return table(["technique", "helps", "because"], advice) if advice else ""


def shortened(names: Sequence[str]) -> str:
    """Join names of modules; a long list is shortened to the first, the last and the count."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def alone(name: str, text: str) -> str:
    """Remove a technique's name from the start of a sentence that is shown next to the name."""
    for start in ("would not: ", "would make ", "was not looked for, which "):
        text = text.removeprefix(f"{name} {start}")
    return text


def module_report(profile: ModuleProfile) -> str:
    """Format the kinds of tensors at the peak, the largest modules and the largest tensors."""
    head = "\n".join(fill(line, WIDTH) for line in peak_lines(profile))
    kinds = [[*share_of(profile, profile.by_kind[kind]), kind] for kind in KINDS]
    modules = [[*share_of(profile, row.n_bytes), row.fqn or "(the module itself)"] for row in profile.modules[:SHOWN]]
    tensors = [
        [*share_of(profile, row.n_bytes), f"{list(row.shape)} {row.dtype}", called(row)]
        for row in profile.tensors[:SHOWN]
    ]
    tables = [
        table(["bytes", "share", "kind at the peak"], kinds),
        table(["bytes", "share", "largest modules"], modules),
        table(["bytes", "share", "shape", "largest tensors"], tensors),
    ]
    why = f", because the step needs values ({profile.reason.partition(chr(10))[0]:.80})" if profile.reason else ""
    return "\n\n".join([head, *tables, fill(f"counted on {profile.measured}{why}", WIDTH)])


def peak_lines(profile: ModuleProfile) -> list[str]:
    """Return lines that say where the peak is, and what its largest part is."""
    size = "" if profile.batch_size is None else f", batch of {profile.batch_size:,}"
    where = f" of {profile.peak_module}" if profile.peak_module else ""
    largest = f"{PARTS_IN_WORDS[profile.largest]} ({profile.largest})"
    return [
        f"peak of a training step: {format_bytes(profile.peak_bytes)} in the {PHASES[profile.peak_phase]}{where}{size}",
        f"largest part: {largest}, {' = '.join(share_of(profile, profile.parts[profile.largest]))}",
    ]


def trace_lines(file: str, trace: StepTrace) -> str:
    """Say what was written and what shows it, and what CUDA's allocator would reserve."""
    shown = "pytorch.org/memory_viz" if file.endswith(".pickle") else "ui.perfetto.dev or chrome://tracing"
    allocator = trace.reserved_by(AllocatorSettings())
    reserved, used = allocator.peak_reserved, allocator.peak_allocated
    said = (
        f"wrote {file}, which {shown} opens. CUDA's allocator would reserve {format_bytes(reserved)} for this step,"
        f" {reserved / max(1, used) - 1:.0%} more than its tensors take, beside the context of the device"
    )
    return fill(said, WIDTH, break_on_hyphens=False, break_long_words=False)


def share_of(profile: ModuleProfile, n_bytes: int) -> list[str]:
    """Format bytes, and their share of the peak."""
    return [format_bytes(n_bytes), f"{100 * n_bytes / max(1, profile.peak_bytes):.0f} %"]


# printing a profile shows its report; set here, because profiles must not import reports
ModuleProfile.__str__ = module_report  # type: ignore[method-assign, assignment]


def called(tensor: TensorBytes) -> str:
    """Return a readable name of a tensor; the name of a parameter includes its module."""
    return tensor.name if not tensor.fqn or tensor.name.startswith(tensor.fqn) else f"{tensor.fqn}: {tensor.name}"
