"""Define the entry of chunk in the table of techniques: its spec, and the predicted peak and time of a step with it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_amp.costs.choose_forms import rules_again
from lightning_amp.costs.profiled_step import LEAST_SECONDS, Draft, ProfiledStep
from lightning_amp.costs.rule import Rule, runs_again
from lightning_amp.footprint.chain.chain import CHUNKED, extra_seconds
from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.techniques.technique import Installer, Prediction, Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkBlock:
    """Run regions of a block in chunks, in both passes; or regions of the code that a module runs after its blocks.

    Attributes:
        budget_bytes: Peak bytes allowed beyond its arguments and parameters: in training, of the forward and backward
            pass with the tensors kept between them; otherwise of the forward pass.
        after: For the code after the last block, such as head and loss: number of block calls in a forward pass of the
            module; 0 for a block.
    """

    budget_bytes: int
    after: int = 0


def forms_of(step: ProfiledStep) -> ChunkForms | None:
    """Return the chunked forms of a step's blocks; None if the blocks were not captured."""
    found: ChunkForms | None = step.facts.get("chunk")
    return found


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Run blocks in chunks; if the plan recomputes blocks, choose chunks, recomputation or both for each block."""
    if "logits" in draft.strategies:
        return "it is not supported together with logits"
    # the blocks to recompute are chosen again, together with the blocks that run in chunks
    before = [target for target in draft.targets if runs_again(target)]
    forms = forms_of(seen)
    if forms is None or forms.reason:
        return "the blocks were not looked at" if forms is None else forms.reason
    found = forms.choose(None if budget is None else budget + draft.relief_bytes, recompute=bool(before))
    chunked = {name: form for name, form in found.forms.items() if form >= CHUNKED}
    again = [*found.recomputed, *(name for name, form in chunked.items() if forms.form(name, form).again)]
    if not chunked:
        return "no block takes less in chunks, or none has to"
    if before and not again:
        return f"chunks alone do as well, without {before[0].strategy}"
    others = tuple(target for target in draft.targets if not runs_again(target))
    n_blocks = len({block.fqn for block in forms.chain.blocks if block.fqn in chunked and not block.after})
    return replace(
        draft,
        peak_bytes=draft.with_chain_peak(found.peak_bytes),
        seconds=draft.seconds - extra_seconds(seen.chain, [target.fqn for target in before]) + found.extra_seconds,
        targets=(
            *others,
            *(rules_again(before[0].strategy, before[0].spec, seen.chain, again) if before else ()),
            *(in_chunks(forms, name, form, n_blocks) for name, form in chunked.items()),
        ),
    )


def in_chunks(forms: ChunkForms, name: str, number: int, n: int) -> Rule:
    """Return the rule for a block in one of its chunked forms, of `n` blocks that have one."""
    form, calls = forms.form(name, number), [b for b in forms.chain.blocks if b.fqn == name]
    seconds = sum(call.extra_seconds(number) - form.again * call.forward_seconds for call in calls)
    blocks, after = {block.fqn for block in forms.chain.blocks if not block.after}, calls[0].after
    what = f"{n} of {len(blocks)} blocks run in chunks, this one"
    if after:
        what = f"what follows its {after} blocks runs in chunks,"
    within = f"within {format_bytes(form.budget_bytes)} in addition to its arguments"
    return Rule(
        strategy="chunk",
        fqn=name,
        spec=ChunkBlock(budget_bytes=form.budget_bytes, after=calls[0].after),
        why=f"{what} {within}, for {format_seconds(max(seconds, LEAST_SECONDS))} more",
        saves_bytes=0 if form.again else max(0, sum(c.saved_bytes - c.held(number)[0] for c in calls)),
    )


def _notes(step: ProfiledStep) -> Iterator[str]:
    forms = forms_of(step)
    # not computed for a step that fits without chunks
    if forms is not None and forms.known and forms.thinned:
        yield f"{forms.thinned[0]!r} has more regions that could run in chunks than are compared"


ROW = Technique(
    title="chunk",
    shrinks="inner tensors of a block to those of one chunk",
    specs=(ChunkBlock,),
    installers={
        ChunkBlock: Installer("lightning_amp.techniques.chunk.run.chunk_module:chunk_block", on_blocks=True, last=True)
    },
    look="lightning_amp.techniques.chunk.look:look",
    refusal="lightning_amp.techniques.chunk.look:refusal",
    evaluation=lambda n_bytes: ChunkBlock(budget_bytes=n_bytes),
    code="lightning_amp.techniques.chunk.look:code",
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="the peak is outside of the blocks, or what they keep is whole between the chunks",
        turn=3,
        slow=True,
        notes=_notes,
    ),
)
