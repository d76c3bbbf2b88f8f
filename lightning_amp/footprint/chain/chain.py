"""Define `Chain`, from which the bytes and the time of a step follow for every choice of forms of its blocks.

A block is recomputed if nothing of its forward pass is kept but its inputs, and its forward pass runs again in the
backward pass. Blocks stand in the order of their forward passes; backward passes run in reverse order, so that what is
held between the two by the blocks before some place is a sum over these blocks.

    held by a block     KEPT             saved_bytes, and the tensors `keeps`
                        RECOMPUTED       the tensors `inputs`
                        CHUNKED + n      saved_bytes and `keeps` of its n-th form in chunks
    bytes at a moment   n_bytes + saved_bytes of the blocks first <= i < after, each in its form
                        + every tensor of `alive`, or held by one of these blocks, once

Here `keeps` and `inputs` are of tensors that more than one block holds, or that are alive for other reasons for a
while: the residual stream, a mask, an activation that its own block and the next one save. They are counted once.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lightning_amp.errors import PlanError

KEPT, RECOMPUTED, CHUNKED = 0, 1, 2
"""Forms of a block: as it is, computed again, the first of those in chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkForm:
    """A block of which some operators run in chunks.

    Attributes:
        budget_bytes: That the block was given, in its two passes, besides its arguments and parameters.
        saved_bytes: What it alone keeps from its forward to its backward pass.
        keeps: Tensors (places in `Chain.tensors`) that it holds too.
        extra_seconds: What it takes more than the block as it is.
        again: Whether it is recomputed besides: its forward pass runs in chunks once more before its backward pass.
    """

    budget_bytes: int
    saved_bytes: int
    keeps: tuple[int, ...]
    extra_seconds: float
    again: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """One call of a block in a training step.

    Attributes:
        fqn: Name of the block; a block that is called twice has two calls, and one decision.
        forward_seconds: Of its forward pass, which is what recomputing it costs.
        saved_bytes: What it alone keeps from its forward to its backward pass if it is not recomputed.
        keeps: Tensors (places in `Chain.tensors`) that it holds too if it is not recomputed.
        inputs: Tensors that it holds if it is.
        fixed: Why it cannot be recomputed, "" where it can.
        chunks: Its forms in chunks; none where none were looked for.
        after: Of what a module computes after its last block, which stands here as a block by the module's name, how
            many calls of blocks there were before it; 0 for a block.
    """

    fqn: str
    forward_seconds: float
    saved_bytes: int
    keeps: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    fixed: str = ""
    chunks: tuple[ChunkForm, ...] = ()
    after: int = 0

    def held(self, form: int) -> tuple[int, tuple[int, ...]]:
        """Bytes that it alone holds between its passes in a form, and the tensors that it holds too."""
        if form >= CHUNKED:
            found = self.chunks[form - CHUNKED]
            return found.saved_bytes, found.keeps
        return (0, self.inputs) if form == RECOMPUTED else (self.saved_bytes, self.keeps)

    def extra_seconds(self, form: int) -> float:
        """What a form takes more than the block as it is."""
        if form >= CHUNKED:
            return self.chunks[form - CHUNKED].extra_seconds
        return self.forward_seconds if form == RECOMPUTED else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainMoment:
    """A moment of the step at which memory may be at its peak.

    Attributes:
        n_bytes: Alive whatever the blocks first <= i < after hold, without the tensors of `Chain.tensors`.
        first: Of the blocks whose forward pass has ended and whose backward pass has not begun.
        after: One past the last of them.
        alive: Tensors that are alive whatever those blocks hold.
        block: Block that is at work, if the moment exists for one of its forms only; None if for all.
        form: Of these, the form.
        where: Phase and module, for a person.
    """

    n_bytes: int
    first: int = 0
    after: int = 0
    alive: tuple[int, ...] = ()
    block: int | None = None
    form: int = KEPT
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The blocks of a module in a training step.

    Attributes:
        blocks: Calls in the order of their forward passes.
        tensors: Bytes of the tensors that blocks share.
        moments: All at which memory may be at its peak.
        seconds: Of the step with nothing recomputed.
    """

    blocks: tuple[BlockCost, ...]
    tensors: tuple[int, ...] = ()
    moments: tuple[ChainMoment, ...] = ()
    seconds: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Blocks that can be recomputed, each once."""
        # one decision holds for all calls of a block, so one call that cannot be recomputed rules its name out
        fixed = {block.fqn for block in self.blocks if block.fixed}
        return tuple(dict.fromkeys(b.fqn for b in self.blocks if b.fqn not in fixed))

    @property
    def all_fixed(self) -> str:
        """Why no block can run a second time; "" where one can, and where there is none."""
        fixed = group_reasons((block.fqn, block.fixed) for block in self.blocks if block.fixed and not block.after)
        return f"no block can run a second time; {fixed}" if fixed and not self.names else ""


Forms = Collection[str] | Mapping[str, int]
"""Names of blocks with their forms; names alone are of blocks that are recomputed. All others are as they are."""


def peak_bytes(chain: Chain, forms: Forms) -> int:
    """Most bytes alive at once while the named blocks run in these forms.

    Raises:
        PlanError: A name that is no block of the chain, or a form that the block does not have.
    """
    found = _by_name(chain, forms)
    of_block = [found.get(block.fqn, KEPT) for block in chain.blocks]
    most = 0
    for moment in chain.moments:
        if moment.block is None or of_block[moment.block] == moment.form:
            tensors, n_bytes = set(moment.alive), moment.n_bytes
            for i in range(moment.first, moment.after):
                own_bytes, own_tensors = chain.blocks[i].held(of_block[i])
                tensors.update(own_tensors)
                n_bytes += own_bytes
            most = max(most, n_bytes + sum(chain.tensors[k] for k in tensors))
    return most


def extra_seconds(chain: Chain, forms: Forms) -> float:
    """Time that these forms add to a step."""
    found = _by_name(chain, forms)
    return sum(block.extra_seconds(found.get(block.fqn, KEPT)) for block in chain.blocks)


def _by_name(chain: Chain, forms: Forms) -> Mapping[str, int]:
    found = forms if isinstance(forms, Mapping) else dict.fromkeys(forms, RECOMPUTED)
    again = {name for name, form in found.items() if form == RECOMPUTED}
    unknown = sorted(again - set(chain.names))
    if unknown:
        fixed = {block.fqn: block.fixed for block in chain.blocks if block.fixed}
        why = fixed.get(unknown[0], "no block of that name was called in the step")
        raise PlanError(
            f"recomputing {unknown[0]!r} is not possible: {why}; allowed are {', '.join(chain.names) or 'none'}"
        )
    return found


SHOWN = 3
"""Reasons that are spelled out."""


def group_reasons(reasons: Iterable[tuple[str, str]]) -> str:
    """Of pairs of a block's name and a reason: "of blocks.0 to blocks.11 it has hooks; of head.2 it is compiled"."""
    blocks: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(reasons):
        blocks.setdefault(reason, []).append(name)
    said = [f"of {' and '.join(_runs(names))} {reason}" for reason, names in blocks.items()]
    more = len(said) - SHOWN
    return "; ".join([*said[:SHOWN], *([f"and {more} more reasons"] if more > 0 else [])])


def _runs(names: Iterable[str]) -> list[str]:
    """Names, of which "blocks.0" and what follows it by number are one: "blocks.0 to blocks.11"."""
    runs, following = list[tuple[str, str]](), ""
    for name in names:
        if runs and name == following:
            runs[-1] = runs[-1][0], name
        else:
            runs.append((name, name))
        before, dot, number = name.rpartition(".")
        following = f"{before}{dot}{int(number) + 1}" if number.isdecimal() else ""
    return [first if first == last else f"{first} to {last}" for first, last in runs]
