"""The diagnosis of a module's step as text of at most 80 columns: what holds the peak, what helps, what does not."""

from collections.abc import Sequence
from textwrap import wrap

from lightning_amp.planning.plan.module_diagnosis import ModuleDiagnosis
from lightning_amp.planning.reports.table import WIDTH, table
from lightning_amp.quantities import format_bytes

LARGEST = {
    "parameters": "parameters, gradients and optimiser state",
    "tensor": "one large tensor",
    "saved": "what the forward pass saves for the backward pass",
    "head": "logits, and what the loss makes of them",
}


def diagnosis_sections(diagnosis: ModuleDiagnosis) -> list[str]:
    """Where the peak is, its largest modules, and every technique with what it would do."""
    first = (
        f"the step as it is: {format_bytes(diagnosis.peak_bytes)}, counted on {diagnosis.measured}; the largest part is"
        f" {LARGEST[diagnosis.largest]}"
    )
    rows = [
        [
            format_bytes(size),
            f"{100 * size / max(1, diagnosis.peak_bytes):.0f} %",
            fqn or "(the module itself)",
        ]
        for fqn, size in diagnosis.modules.items()
    ]
    sections = ["\n".join(wrap(first, WIDTH)), table(["bytes", "share", "modules at the peak"], rows)]
    return [*sections, *filter(None, [advice_table(diagnosis)])]


def advice_table(diagnosis: ModuleDiagnosis) -> str:
    """Every technique with what it would do; "" where there is none."""
    advice = [[name, "helps", alone(name, text)] for name, text in diagnosis.helps.items()]
    advice += [[name, "does not", alone(name, text)] for name, text in diagnosis.does_not_help.items()]
    return table(["technique", "helps", "because"], advice) if advice else ""


def shortened(names: Sequence[str]) -> str:
    """Names of modules; of many the first, the last and how many."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def alone(name: str, text: str) -> str:
    """A sentence without the technique's name, which stands before it."""
    return text.removeprefix(f"{name} would not: ").removeprefix(f"{name} would make ")
