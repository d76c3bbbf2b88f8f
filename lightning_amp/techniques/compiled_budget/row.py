"""Define the entry of compiled_budget in the table of techniques: its spec, and the counted peak and time with it."""

from dataclasses import dataclass, replace

from lightning_amp.costs.profiled_step import LEAST_SECONDS, Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.technique import Installer, Prediction, Technique

NAME = "compiled_budget"
SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, 0.01)
"""Budgets that are counted, from the fastest to the one that computes most again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledBudget:
    """Graphs of compiled modules keep a share of what they would keep, and compute the rest again.

    Attributes:
        share: torch's `activation_memory_budget`: 1 keeps what is fastest, values near 0 the
            inputs of a graph and random draws only.
    """

    share: float = 1.0


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Count the step with several budgets; take the fastest that fits, or that with the least memory."""
    if draft.targets:
        return f"it is not supported together with {' and '.join(draft.strategies)}"
    if seen.counted is None:
        return "the step was not counted with it"
    found = list[Draft]()
    for share in SHARES:
        rule = Rule(strategy=NAME, fqn="", spec=CompiledBudget(share=share), why="counted")
        step = seen.counted(rule)
        if isinstance(step, str):
            return step
        saved = seen.profile.peak_bytes - step.profile.peak_bytes
        more = max(step.chain.seconds - seen.chain.seconds, LEAST_SECONDS)
        why = (
            f"counted: compiled graphs with an activation memory budget of {share:g} keep {format_bytes(saved)} less"
            f" than the step without them, and take {format_seconds(more)} more"
        )
        made = replace(
            draft,
            peak_bytes=draft.peak_bytes - saved,
            seconds=draft.seconds + more,
            targets=(replace(rule, why=why, saves_bytes=saved),),
        )
        if budget is not None and made.peak_bytes <= budget:
            # peaks are not monotonic in the budget, but seconds are
            return made
        found.append(made)
    return min(found, key=lambda one: one.peak_bytes)


ROW = Technique(
    title="a memory budget of compiled graphs",
    shrinks="what graphs of modules that their user compiled keep for the backward pass",
    specs=(CompiledBudget,),
    installers={CompiledBudget: Installer("lightning_amp.techniques.compiled_budget.install:install")},
    refusal="lightning_amp.techniques.compiled_budget.install:refusal",
    runs_compiled=True,
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="the peak is outside of what is compiled",
        order=8,
        slow=True,
        quiet=True,
    ),
)
