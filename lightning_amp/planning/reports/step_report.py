"""Describe in text which tensors a step without techniques holds, and what the planner recommends."""

from collections.abc import Mapping
from textwrap import fill, wrap
from typing import TypeVar

from lightning_amp.footprint.module_profile import ModuleBytes, ModuleProfile, TensorBytes
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.recommend_devices import WORTH, Recommendation, Scale, ratio
from lightning_amp.planning.reports.module_report import advice_table, called, peak_lines, share_of, shortened
from lightning_amp.planning.reports.plan_report import note_lines, step_text, techniques
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.table import label
from lightning_amp.text_table import WIDTH, table

T = TypeVar("T", ModuleBytes, TensorBytes)
SHOWN = 5
"""Number of modules and tensors, largest first; repeated modules count as one."""


def step_report(plan: Plan, profile: ModuleProfile, *, classes: Mapping[str, str]) -> str:
    """Format the peak, the diagnosis, the plan and its prediction.

    Args:
        profile: Profile of the step without techniques.
        classes: Class of each module by name; "" is the name of the root module.
    """
    assert plan.diagnosis is not None, "the plan of a profiled step has one"
    ranks = plan.mesh.ranks
    lines = [f"{classes['']} on {'1 device' if ranks == 1 else f'{ranks} devices'}", *peak_lines(profile)]
    blocks = list(dict.fromkeys(rule.fqn for rule in plan.rules if rule.fqn not in ("", "*")))
    named = " and ".join(label(one) if one == "S1" else one for one in plan.strategies)
    chosen = f"{named}{f' of {shortened(blocks)}' if blocks else ''}"
    budget = "" if plan.budget_bytes is None else f" of {format_bytes(plan.budget_bytes)}"
    verdict = {True: " (fits)", False: " (does NOT fit)", None: ""}[plan.fits]
    least = "at least " if plan.uncounted else ""
    rows = [
        ("plan", chosen if plan.rules else "nothing to install"),
        ("predicted peak", f"{least}{format_bytes(plan.predicted_peak_bytes)}{budget} per device{verdict}"),
    ]
    if plan.on_device is not None:
        rows[1] = ("predicted peak", f"{least}{format_bytes(plan.predicted_peak_bytes)} of tensors per device")
        rows.append(("on the device", f"{plan.on_device.in_words()}{verdict}"))
    if plan.predicted_step_seconds is not None:
        rows.append(("predicted step", f"{step_text(plan)} at the rates of {plan.rates_device}"))
    predicted = "\n".join(
        fill(value, WIDTH, initial_indent=f"{key:16}", subsequent_indent=" " * 16) for key, value in rows
    )
    sections = ["\n".join(fill(line, WIDTH) for line in lines), *_holders(profile, classes)]
    sections += [advice_table(plan.diagnosis), predicted]
    return "\n\n".join(filter(None, [*sections, *note_lines(plan)]))


def _holders(profile: ModuleProfile, classes: Mapping[str, str]) -> list[str]:
    """Format the modules and tensors that hold most at the peak."""
    modules: dict[tuple[str, ...], list[ModuleBytes]] = {}
    for module in profile.modules:
        kind = classes.get(module.fqn, "")
        modules.setdefault((_any_number(module.fqn), kind), []).append(module)
    tensors: dict[tuple[str, ...], list[TensorBytes]] = {}
    for tensor in profile.tensors:
        shape = f"{list(tensor.shape)} {tensor.dtype}"
        tensors.setdefault((_any_number(called(tensor)), shape, tensor.kind), []).append(tensor)
    held = [
        [
            *share_of(profile, sum(one.n_bytes for one in group)),
            f"{group[0].fqn or 'itself'} ({kind})" if len(group) == 1 else f"{fqn} ({len(group)} x {kind})",
        ]
        for (fqn, kind), group in _largest(modules)
    ]
    alive = [
        [
            *share_of(profile, sum(one.n_bytes for one in group)),
            shape if len(group) == 1 else f"{len(group)} x {shape}",
            kind,
            called(group[0]) if len(group) == 1 else name,
        ]
        for (name, shape, kind), group in _largest(tensors)
    ]
    return [
        table(["bytes", "share", "modules at the peak"], held),
        table(["bytes", "share", "shape", "kind", "tensors at the peak"], alive),
    ]


def _any_number(name: str) -> str:
    """Replace the number in a repeated module's name: "blocks.*.norm"."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _largest(groups: dict[tuple[str, ...], list[T]]) -> list[tuple[tuple[str, ...], list[T]]]:
    return sorted(groups.items(), key=lambda item: -sum(one.n_bytes for one in item[1]))[:SHOWN]


def recommendation_report(found: Recommendation) -> str:
    """Format the recommended number of devices, the compared numbers, and the rule."""
    noun = "device" if found.devices == 1 else "devices"
    cells = "1 cell" if found.cells == 1 else f"{found.cells:,} cells in all"
    first = f"Worth having: {found.devices or 'no number of'} {noun}, for steps of {cells}"
    rule = (
        "The cells of a step are shared by the ranks of the data axis. Times are of whole steps, with the rates of"
        f" {found.rates_device}; the share is that of the ideal speed-up. A doubling is worth it from {WORTH} x on."
        f" Links between nodes of {found.node_devices} are slower, and counted so."
    )
    memory = "unknown" if found.budget_bytes is None else format_bytes(found.budget_bytes)
    header = ["devices", "mesh", "peak", "step", "faster", "share", "doubling", "techniques"]
    return "\n\n".join(
        [
            "\n".join(wrap(f"{first}: {found.why}", WIDTH)),
            table(header, [_row(scale) for scale in found.scales]),
            "\n".join(wrap(f"{rule} Memory of a device: {memory}.", WIDTH)),
        ]
    )


def _row(scale: Scale) -> list[str]:
    best = scale.best
    return [
        f"{scale.devices}",
        f"{best.data} x {best.model}",
        format_bytes(best.peak_bytes),
        format_seconds(scale.step_seconds),
        "-" if scale.speed_up is None else f"{scale.speed_up:.3g} x",
        "-" if scale.efficiency is None else f"{100 * scale.efficiency:.0f} %",
        scale.worth if scale.gain is None else f"{scale.worth}, {ratio(scale.gain)}",
        techniques(best.strategies),
    ]
