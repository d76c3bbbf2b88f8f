"""Define the interface between the planner and a technique that splits the blocks of a step into stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule, Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOptions:
    """Requested options of stages; None means that the search decides.

    Attributes:
        model: Ranks of the model axis.
        micro_batches, schedule: As in AMPStrategy.
        ends: One past the last block of every stage.
        again: Patterns of blocks to recompute; if None, as few as are needed to fit.
        host: Spec of what waits in host memory; None if nothing does.
        speeds: Speed of every rank relative to the fastest; empty if all are equal.
        memory: Bytes of every rank; with one number or none, all ranks have the budget.
    """

    model: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    ends: tuple[int, ...] | None = None
    again: tuple[str, ...] | None = None
    host: Spec | None = None
    speeds: tuple[float, ...] = ()
    memory: tuple[int, ...] = ()

    def more_bytes(self, model: int) -> tuple[int, ...]:
        """Bytes by which each rank of the model axis exceeds the smallest rank, the minimum over all model groups."""
        if len(self.memory) < 2:
            return (0,) * model
        return tuple(min(self.memory[m::model]) - min(self.memory) for m in range(model))


OPEN = StageOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSearch:
    """Functions that search for stages, and requirements of a run with stages.

    Attributes:
        staged: (step, ranks of the model axis, data=, budget=, options=) -> the draft, or why there is none.
        best: (step, ranks=, budget=, options=) -> the fastest draft that fits over all lengths of the model axis that
            divide the ranks, or why there is none.
        blocks: Step -> number of blocks that can be stages, or why there are none.
        fixed: (spec, rules of a plan) -> everything that the plan has decided, as options.
        named: (options, other techniques that the user named, budget_named=) -> the options with these techniques.
            Raises PlanError for a technique that cannot be combined with stages.
        inside: Options -> a technique that they request inside stages, or "".
        uncut: (step, options) -> why the batch cannot be cut into the micro-batches of the options, or "".
        without: (step, reason) -> the step with the reason why it has no stages.
        limit: Why stages may not help if they hardly lower the peak.
        names: "module:function": module -> names of the blocks that can be stages, or none and why.
        refuse: "module:function": (module) -> None; raises for a module that would train differently in stages.
        install: "module:function": (module, overridden forwards, spec, mesh, parameters_of) -> the parameters, and
            the object that runs the module's steps as stages. `parameters_of(module, [(block, rank)], mesh)` frees the
            parameters of other ranks. Given by name, as `names` and `refuse` are, because it imports torch.
    """

    staged: Callable[..., Draft | str]
    best: Callable[..., Draft | str]
    blocks: Callable[[ProfiledStep], int | str]
    fixed: Callable[[Any, Sequence[Rule]], StageOptions]
    named: Callable[..., StageOptions]
    inside: Callable[[StageOptions], str]
    uncut: Callable[[ProfiledStep, StageOptions], str]
    without: Callable[[ProfiledStep, str], ProfiledStep]
    limit: str
    names: str
    refuse: str
    install: str
