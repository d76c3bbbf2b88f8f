"""Define `Chain`: it gives the peak bytes and the time of a step for every choice of forms of its blocks.

A recomputed block keeps only the inputs of its forward pass, which runs again in the backward pass. Blocks are sorted
by their forward passes, and backward passes run in reverse order. Between the two, the bytes that blocks hold are
therefore a sum over a range of blocks.

    held by a block     KEPT             saved_bytes, and the tensors `keeps`
                        RECOMPUTED       the tensors `inputs`
                        CHUNKED + n      saved_bytes and `keeps` of its n-th form in chunks
    bytes at a moment   n_bytes + saved_bytes of the blocks first <= i < after, each in its form
                        + each tensor of `alive`, or held by one of these blocks, once

`keeps` and `inputs` list tensors that several blocks hold, or that other code holds for a while: the residual stream, a
mask, an activation that two blocks save. Each is counted once.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lightning_amp.errors import PlanError

KEPT, RECOMPUTED, CHUNKED = 0, 1, 2
"""Forms of a block: unchanged, recomputed, and the first of its forms in chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkForm:
    """A form of a block in which some operators run in chunks.

    Attributes:
        budget_bytes: Bytes that its two passes may take, without its arguments and parameters.
        saved_bytes: Bytes that it alone keeps from its forward to its backward pass.
        keeps: Tensors (indices into `Chain.tensors`) that it also holds.
        extra_seconds: Time in addition to that of the unchanged block.
        again: Whether it is also recomputed: its forward pass runs in chunks again before its backward pass.
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
        fqn: Name of the block; a block that is called twice has two calls, which have the same form.
        forward_seconds: Time of its forward pass, which is the cost of recomputing it.
        saved_bytes: Bytes that it alone keeps from its forward to its backward pass if it is not recomputed.
        keeps: Tensors (indices into `Chain.tensors`) that it also holds if it is not recomputed.
        inputs: Tensors that it holds if it is recomputed.
        fixed: Why it cannot be recomputed; "" if it can.
        chunks: Its forms in chunks; empty if none were computed.
    """

    fqn: str
    forward_seconds: float
    saved_bytes: int
    keeps: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    fixed: str = ""
    chunks: tuple[ChunkForm, ...] = ()

    def held(self, form: int) -> tuple[int, tuple[int, ...]]:
        """Return the bytes that it alone holds between its passes in a form, and the shared tensors that it holds."""
        if form >= CHUNKED:
            found = self.chunks[form - CHUNKED]
            return found.saved_bytes, found.keeps
        return (0, self.inputs) if form == RECOMPUTED else (self.saved_bytes, self.keeps)

    def extra_seconds(self, form: int) -> float:
        """Return the time of a form in addition to that of the unchanged block."""
        if form >= CHUNKED:
            return self.chunks[form - CHUNKED].extra_seconds
        return self.forward_seconds if form == RECOMPUTED else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainMoment:
    """A moment of the step at which memory may be at its peak.

    Attributes:
        n_bytes: Bytes alive in every choice of forms of the blocks first <= i < after, without `Chain.tensors`.
        first: First of the blocks whose forward pass has ended and whose backward pass has not begun.
        after: One past the last of them.
        alive: Tensors that are alive in every choice of forms of those blocks.
        block: Block that is running, if the moment exists in one of its forms only; None if it exists in all.
        form: That form.
        where: Phase and module, for messages.
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
        moments: All moments at which memory may be at its peak.
        seconds: Time of the step without recomputation.
        launch_seconds: Part of it that is the overhead of operators, whatever they compute.
    """

    blocks: tuple[BlockCost, ...]
    tensors: tuple[int, ...] = ()
    moments: tuple[ChainMoment, ...] = ()
    seconds: float = 0.0
    launch_seconds: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of blocks that can be recomputed."""
        # all calls of a block have the same form, so one call that cannot be recomputed excludes the block
        fixed = {block.fqn for block in self.blocks if block.fixed}
        return tuple(dict.fromkeys(b.fqn for b in self.blocks if b.fqn not in fixed))

    @property
    def all_fixed(self) -> str:
        """Why no block can run a second time; "" if one can, or if there are no blocks."""
        fixed = group_reasons((block.fqn, block.fixed) for block in self.blocks if block.fixed)
        return f"no block can run a second time; {fixed}" if fixed and not self.names else ""


Forms = Collection[str] | Mapping[str, int]
"""Forms by block name; a collection of names means that these are recomputed. All other blocks are unchanged."""


def peak_bytes(chain: Chain, forms: Forms) -> int:
    """Return the most bytes alive at once while the named blocks run in these forms.

    Raises:
        PlanError: A name is not a block of the chain, or the block does not have the form.
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
    """Return the time that these forms add to a step."""
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
"""Number of reasons in a message."""


def group_reasons(reasons: Iterable[tuple[str, str]]) -> str:
    """Join (block name, reason) pairs: "of blocks.0 to blocks.11 it has hooks; of head.2 it is compiled"."""
    blocks: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(reasons):
        blocks.setdefault(reason, []).append(name)
    said = [f"of {' and '.join(_runs(names))} {reason}" for reason, names in blocks.items()]
    more = len(said) - SHOWN
    return "; ".join([*said[:SHOWN], *([f"and {more} more reasons"] if more > 0 else [])])


def _runs(names: Iterable[str]) -> list[str]:
    """Merge names with consecutive numbers: "blocks.0 to blocks.11"."""
    runs, following = list[tuple[str, str]](), ""
    for name in names:
        if runs and name == following:
            runs[-1] = runs[-1][0], name
        else:
            runs.append((name, name))
        before, dot, number = name.rpartition(".")
        following = f"{before}{dot}{int(number) + 1}" if number.isdecimal() else ""
    return [first if first == last else f"{first} to {last}" for first, last in runs]
