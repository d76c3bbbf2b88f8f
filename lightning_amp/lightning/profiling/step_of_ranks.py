"""Count the step of a module with a decoder with all rules of its plan, as one rank of a model axis without the others.

Ranks whose shares differ in size need different memory. Each of these is counted, and the plan is made for the fullest.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning.pytorch import LightningModule

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.installing.install import install_rules
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.base.plan_request import NOTHING_REQUESTED, StepRequest
from lightning_amp.planning.modules.plan_module import Count
from lightning_amp.planning.plan.plan import Explanation
from lightning_amp.sharding.splits import DryAxis
from lightning_amp.techniques.ranks.shards import sizes_of_rank
from lightning_amp.techniques.table import rules_in_order

MOST = 16
"""Most ranks of the model axis that are compared."""
KEPT = 4
"""Most of them that are counted again with techniques beyond the decoder, those with the largest peaks."""


def on_top_of(
    step: StepOfModule, rules: Sequence[Rule], ranks: int, *, rates: Rates, request: StepRequest = NOTHING_REQUESTED
) -> tuple[ProfiledStep, Count]:
    """Return the step with rules of its decoder, as `StepOfModule.profiled`, and what counts it with further rules.

    Args:
        step: The step without rules.
        ranks: Ranks of the model axis.
        rates, request: Arguments of `StepOfModule.profiled`.

    Raises:
        AmpError: As `StepOfModule.profiled`.
    """
    step.take_once(rates)
    compared = sorted({rank * (ranks - 1) // (MOST - 1) for rank in range(MOST)}) if ranks > MOST else range(ranks)
    alike = alike_ranks(step.module, rules, [DryAxis(ranks, rank) for rank in compared]) if ranks > 1 else [[None]]
    found = [step.with_decoder(rules, axes[0]) for axes in alike]
    if len(found) > KEPT:
        found.sort(key=lambda one: one.count(()).larger_peak_bytes, reverse=True)
    elif len(found) > 1:
        # the count of the fullest serves its profile too, which takes a little longer to count
        found.sort(key=lambda one: one.step().profile.larger_peak_bytes, reverse=True)
    kept, fullest = found[:KEPT], found[0]
    seen = fullest.profiled(rates, request)
    notes = list(seen.notes)
    if fullest.axis is not None and len(found) > 1:
        of = f"the peak is that of rank {fullest.axis.get_local_rank()} of the model axis, the largest"
        notes.append(Explanation(f"{of} of {len(found)} that were counted, for their shares differ in size"))
    if len(kept) < len(found):
        notes.append(Explanation(f"with techniques beyond the decoder, the {KEPT} fullest of these ranks were counted"))
    if len(compared) < ranks:
        notes.append(f"of {ranks} ranks of the model axis {MOST} were compared, and another one may take more")

    def count(more: Sequence[Rule]) -> ModuleProfile:
        largest = max(kept, key=lambda one: one.count(more).larger_peak_bytes)
        # the last count is the one that a plan's step is found by
        return largest.count(more)

    return replace(seen, notes=tuple(notes)), count


def alike_ranks(module: LightningModule, rules: Sequence[Rule], axes: Sequence[DryAxis]) -> list[list[DryAxis]]:
    """Return the ranks with equal sizes of shares, which need equal memory, together; the module is unchanged."""
    found = dict[tuple[object, ...], list[DryAxis]]()
    for axis in axes:
        installed = install_rules(module, rules_in_order(rules), axis)
        try:
            found.setdefault(sizes_of_rank(module), []).append(axis)
        finally:
            installed.undo()
    return list(found.values())
