"""Define what the planner asks of a technique that splits the blocks of a step into stages over the model axis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOptions:
    """What a request says of stages; None leaves it open.

    Attributes:
        model: Ranks of the model axis.
        micro_batches, schedule: As of AMPStrategy.
        ends: One past the last block of every stage.
        again: Patterns of blocks to compute again; left open, as few as are needed to fit.
        chunks: Specs of blocks to run in chunks, by name or pattern; left open, where nothing else fits.
        all_chunks: Left open: all blocks that can be, with the least bytes that do not make them far slower.
        speeds: Of all ranks, by that of the fastest; none: all are equal.
        memory: Bytes of all ranks; one or none: all have the budget.
    """

    model: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    ends: tuple[int, ...] | None = None
    again: tuple[str, ...] | None = None
    chunks: Mapping[str, Any] | None = None
    all_chunks: bool = False
    speeds: tuple[float, ...] = ()
    memory: tuple[int, ...] = ()

    def more_bytes(self, model: int) -> tuple[int, ...]:
        """Of the ranks of the model axis beyond the least of all ranks; of a place the least of its groups."""
        if len(self.memory) < 2:
            return (0,) * model
        return tuple(min(self.memory[m::model]) - min(self.memory) for m in range(model))


OPEN = StageOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSearch:
    """The search for stages, and what a run with stages requires.

    Attributes:
        staged: (step, ranks of the model axis, data=, budget=, asked=) -> the draft, or why there can be none.
        best: (step, ranks=, budget=, asked=) -> the fastest draft that fits over all lengths of the model axis that
            divide the ranks, or why there can be none.
        blocks: Step -> how many blocks can be stages, or why there can be none.
        fixed: (spec, rules of a plan) -> all that the plan has decided, as options.
        named: (options, techniques that a person has named too, budget_named=) -> the options with what these ask.
            Raises PlanError for one that does not go together with stages.
        inside: Options -> a technique that they ask for inside of stages, or "".
        without: (step, reason) -> the step, of which it is known why it has no stages.
        limit: Why stages may not help where they leave the peak about as it is.
        names: "module:function": module -> names of the blocks that can be stages, or none and why.
        refuse: "module:function": (module) -> None; raises what stages would train otherwise than one process.
        install: "module:function": (module, overridden forwards, spec, mesh, parameters_of) -> the parameters, and
            what runs the module's steps as stages; `parameters_of(module, [(block, rank)], mesh)` frees those of other
            ranks. Like `names` and `refuse` it is a name, for it imports torch.
    """

    staged: Callable[..., Draft | str]
    best: Callable[..., Draft | str]
    blocks: Callable[[ProfiledStep], int | str]
    fixed: Callable[[Any, Sequence[Rule]], StageOptions]
    named: Callable[..., StageOptions]
    inside: Callable[[StageOptions], str]
    without: Callable[[ProfiledStep, str], ProfiledStep]
    limit: str
    names: str
    refuse: str
    install: str
