"""Define the entry of chunk in the table of techniques: its spec, and the predicted peak and time of a step with it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from lightning_amp.costs.choose_forms import rules_again
from lightning_amp.costs.profiled_step import LEAST_SECONDS, Draft, ProfiledStep
from lightning_amp.costs.rule import Rule, runs_again
from lightning_amp.footprint.chain.chain import CHUNKED, extra_seconds
from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.quantities import format_bytes, format_seconds, is_number
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.techniques.chunk.regions.choose_chunks import POLICIES, CostModel
from lightning_amp.techniques.chunk.regions.costs import HasSpeed, Speed
from lightning_amp.techniques.option_checks import one_of
from lightning_amp.techniques.technique import Installer, Prediction, Technique

NO_BUDGET = 0
"""Budget of a spec that only has options; no rule has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkBlock:
    """Run regions of a block in chunks, in both passes.

    Attributes:
        budget_bytes: Peak bytes allowed beyond its arguments and parameters: in training, of the forward and backward
            pass with the tensors kept between them; otherwise of the forward pass.
        policy: Quantity that the choice of regions minimizes: "auto" time, "paper" the cost function of AutoChunk.
        matmul_flops, memory_bytes, overhead_seconds: Rates of the device that the plan is for, so that the regions that
            run are those that were planned; None takes those of the device that runs.
    """

    budget_bytes: int = NO_BUDGET
    policy: str = "auto"
    matmul_flops: float | None = None
    memory_bytes: float | None = None
    overhead_seconds: float | None = None

    @classmethod
    def at(cls, costs: CostModel, budget_bytes: int) -> "ChunkBlock":
        """Return the spec for a budget, with the costs by which its regions are chosen."""
        return cls(budget_bytes=budget_bytes, policy=costs.policy, **asdict(Speed.of(costs.rates)))

    @property
    def speed(self) -> Speed | None:
        """Rates by which the regions are chosen; None for those of the device that runs."""
        found = self.matmul_flops, self.memory_bytes, self.overhead_seconds
        if None in found:
            return None
        flops, memory, overhead = (float(n or 0) for n in found)
        return Speed(matmul_flops=flops, memory_bytes=memory, overhead_seconds=overhead)

    def problem(self) -> str:
        """Return what is wrong with the policy or the rates; "" if nothing is."""
        if self.policy not in POLICIES:
            return f"policy={self.policy!r}; allowed are {POLICIES!r}"
        rates = self.matmul_flops, self.memory_bytes, self.overhead_seconds
        ranges = zip(rates, (0.0, 0.0, -1.0), strict=True)
        if rates != (None,) * 3 and not all(is_number(n) and below < n < inf for n, below in ranges):
            return (
                f"matmul_flops, memory_bytes, overhead_seconds = {rates!r}; allowed are numbers above 0, of which the"
                " last may be 0, or null for all three"
            )
        return ""

    def costs(self, device: HasSpeed) -> CostModel:
        """Return the costs by which the regions are chosen, on a device with these rates."""
        return CostModel(policy=self.policy, rates=self.speed or device)


def forms_of(step: ProfiledStep) -> ChunkForms | None:
    """Return the chunked forms of a step's blocks; None if the blocks were not captured."""
    found: ChunkForms | None = step.facts.get("chunk")
    return found


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Run blocks in chunks; if the plan recomputes blocks, choose chunks, recomputation or both for each block."""
    # the blocks to recompute are chosen again, together with the blocks that run in chunks
    before = [target for target in draft.targets if runs_again(target)]
    forms = forms_of(seen)
    if forms is None or forms.reason:
        return "the blocks were not looked at" if forms is None else forms.reason
    chain = draft.chain or seen.chain
    forms = forms.in_step(chain)
    found = forms.choose(None if budget is None else budget + draft.below_one_device_bytes, recompute=bool(before))
    chunked = {name: form for name, form in found.forms.items() if form >= CHUNKED}
    again = [*found.recomputed, *(name for name, form in chunked.items() if forms.form(name, form).again)]
    if not chunked:
        return "no block takes less in chunks, or none has to"
    if before and not again:
        return f"chunks alone do as well, without {before[0].strategy}"
    others = tuple(target for target in draft.targets if not runs_again(target))
    return replace(
        draft,
        peak_bytes=draft.with_chain_peak(found.peak_bytes),
        seconds=draft.seconds - extra_seconds(chain, [target.fqn for target in before]) + found.extra_seconds,
        targets=(
            *others,
            *(rules_again(before[0].strategy, before[0].spec, chain, again) if before else ()),
            *(in_chunks(forms, name, form, len(chunked)) for name, form in chunked.items()),
        ),
    )


def in_chunks(forms: ChunkForms, name: str, number: int, n: int) -> Rule:
    """Return the rule for a block in one of its chunked forms, of `n` blocks that have one."""
    form, calls = forms.form(name, number), [b for b in forms.chain.blocks if b.fqn == name]
    seconds = sum(call.extra_seconds(number) - form.again * call.forward_seconds for call in calls)
    what = f"{n} of {len({block.fqn for block in forms.chain.blocks})} blocks run in chunks, this one"
    within = f"within {format_bytes(form.budget_bytes)} in addition to its arguments"
    return Rule(
        strategy="chunk",
        fqn=name,
        spec=ChunkBlock.at(forms.costs, form.budget_bytes),
        why=f"{what} {within}, for {format_seconds(max(seconds, LEAST_SECONDS))} more",
        saves_bytes=0 if form.again else max(0, sum(c.saved_bytes - c.held(number)[0] for c in calls)),
    )


def _requested_spec(spec: ChunkBlock, request: Any) -> tuple[ChunkBlock, bool]:
    """Return the spec with `chunk_policy` of a request; its budget is chosen for each block."""
    policy = getattr(request, "chunk_policy", spec.policy)
    one_of("chunk_policy", policy, POLICIES)
    return replace(spec, policy=policy), False


def _notes(step: ProfiledStep) -> Iterator[str]:
    forms = forms_of(step)
    # not computed for a step that fits without chunks
    if forms is not None and forms.known and forms.thinned:
        more = f" and {len(forms.thinned) - 1} more" if len(forms.thinned) > 1 else ""
        yield (
            f"the search for chunks was cut short at its share of work: {forms.thinned[0]!r}{more} has more regions"
            " than are compared, and another choice of them may be better"
        )
    if forms is not None and forms.known:
        yield from forms.failed


ROW = Technique(
    title="chunk",
    shrinks="inner tensors of a block to those of one chunk",
    between_batches=True,
    specs=(ChunkBlock,),
    installers={
        ChunkBlock: Installer("lightning_amp.techniques.chunk.run.chunk_module:chunk_block", on_blocks=True, last=True)
    },
    look="lightning_amp.techniques.chunk.look:look",
    refusal="lightning_amp.techniques.chunk.look:refusal",
    evaluation=lambda n_bytes, rates: ChunkBlock.at(CostModel(rates=rates), n_bytes),
    code="lightning_amp.techniques.chunk.look:code",
    option_names=("chunk_policy",),
    options=_requested_spec,
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="the peak is outside of the blocks, or what they keep is whole between the chunks",
        order=3,
        slow=True,
        notes=_notes,
    ),
)
