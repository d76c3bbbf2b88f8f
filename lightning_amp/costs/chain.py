"""Compute the peak and the extra time of a step in which some blocks run in another form (footprint/chain/)."""

from collections.abc import Collection, Iterable, Mapping

from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.chain import CHUNKED as CHUNKED
from lightning_amp.footprint.chain.chain import KEPT as KEPT
from lightning_amp.footprint.chain.chain import RECOMPUTED as RECOMPUTED
from lightning_amp.footprint.chain.chain import BlockCost as BlockCost
from lightning_amp.footprint.chain.chain import Chain as Chain
from lightning_amp.footprint.chain.chain import ChainMoment as ChainMoment
from lightning_amp.footprint.chain.chain import ChunkForm as ChunkForm

Forms = Collection[str] | Mapping[str, int]
"""Names of blocks with their forms; names alone are of blocks that are recomputed. All others are as they are."""


def peak_bytes(chain: Chain, forms: Forms) -> int:
    """Most bytes alive at once while the named blocks run in these forms.

    Raises:
        PlanError: A name that is no block of the chain, or a form that the block does not have.
    """
    moment = peak_moment(chain, forms)
    return 0 if moment is None else bytes_at(chain, moment, forms)


def peak_moment(chain: Chain, forms: Forms) -> ChainMoment | None:
    """When memory is at its peak; None for a chain without moments."""
    found = _by_name(chain, forms)
    of_block = [found.get(block.fqn, KEPT) for block in chain.blocks]
    exist = [m for m in chain.moments if m.block is None or of_block[m.block] == m.form]
    return max(exist, key=lambda m: bytes_at(chain, m, found), default=None)


def bytes_at(chain: Chain, moment: ChainMoment, forms: Forms) -> int:
    """Bytes alive at a moment."""
    found, held, saved = _by_name(chain, forms), set(moment.alive), 0
    for block in chain.blocks[moment.first : moment.after]:
        n_bytes, tensors = block.held(found.get(block.fqn, KEPT))
        held.update(tensors)
        saved += n_bytes
    return moment.n_bytes + saved + sum(chain.tensors[k] for k in held)


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
    runs: list[tuple[str, str]] = []
    for name in names:
        if runs and name == _next(runs[-1][1]):
            runs[-1] = runs[-1][0], name
        else:
            runs.append((name, name))
    return [first if first == last else f"{first} to {last}" for first, last in runs]


def _next(name: str) -> str:
    before, dot, number = name.rpartition(".")
    return f"{before}{dot}{int(number) + 1}" if number.isdecimal() else ""
