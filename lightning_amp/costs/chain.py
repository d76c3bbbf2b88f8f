"""Compute the peak and the extra time of a step in which some blocks run in another form (footprint/chain/)."""

from collections.abc import Collection, Mapping

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
            f"recomputing {unknown[0]!r} is not possible: {why}; allowed are"
            f" {', '.join(chain.names) or 'none'}"
        )
    return found
