"""The peak and the extra time of a training step in which some blocks are recomputed; see footprint/chain.py."""

from collections.abc import Collection

from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain import BlockCost as BlockCost
from lightning_amp.footprint.chain import Chain as Chain
from lightning_amp.footprint.chain import Moment as Moment


def peak_bytes(chain: Chain, recomputed: Collection[str]) -> int:
    """Most bytes alive at once while the named blocks are recomputed.

    Raises:
        PlanError: A name that is no block of the chain, or of a block that cannot be recomputed.
    """
    moment = peak_moment(chain, recomputed)
    return 0 if moment is None else bytes_at(chain, moment, recomputed)


def peak_moment(chain: Chain, recomputed: Collection[str]) -> Moment | None:
    """When memory is at its peak; None for a chain without moments."""
    _check_names(chain, recomputed)
    again = [block.fqn in recomputed for block in chain.blocks]
    exist = [m for m in chain.moments if m.block is None or again[m.block] == m.recomputed]
    return max(exist, key=lambda m: bytes_at(chain, m, recomputed), default=None)


def bytes_at(chain: Chain, moment: Moment, recomputed: Collection[str]) -> int:
    """Bytes alive at a moment."""
    held, saved = set(moment.alive), 0
    for block in chain.blocks[moment.first : moment.after]:
        again = block.fqn in recomputed
        held.update(block.inputs if again else block.keeps)
        saved += 0 if again else block.saved_bytes
    return moment.n_bytes + saved + sum(chain.tensors[k] for k in held)


def extra_seconds(chain: Chain, recomputed: Collection[str]) -> float:
    """Time that recomputing the named blocks adds to a step."""
    return sum(block.forward_seconds for block in chain.blocks if block.fqn in recomputed)


def _check_names(chain: Chain, recomputed: Collection[str]) -> None:
    unknown = sorted(set(recomputed) - set(chain.names))
    if unknown:
        fixed = {block.fqn: block.fixed for block in chain.blocks if block.fixed}
        why = fixed.get(unknown[0], "no block of that name was called in the step")
        raise PlanError(
            f"recomputing {unknown[0]!r} was asked for, which is not possible: {why}; allowed are"
            f" {', '.join(chain.names) or 'none'}"
        )
