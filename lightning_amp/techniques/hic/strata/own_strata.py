"""Run only the strata of this rank (strata).

    nll_r = sum over rank r's own strata of nll_k,    loss = sum over ranks of nll_r

Strata do not depend on each other, and the softmax of a stratum runs over its features, all of which its rank has. In a
chained decoder every rank runs the spine up to its last stratum, and passes its own strata's gradients down to v.
`mean` runs all strata on every rank.

    collectives of a step      forward                        backward
    complete decoder           1 all-reduce of the loss       1 all-reduce of gradients, N D + B D + B K numbers
    parameters of the strata                                  in the reduction of gradients, once (`Change.partial`)

Legend: N anchors, D dim, B cells, K strata.
"""

from itertools import pairwise
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.shapes import Scalar
from lightning_amp.techniques.checks.decoder import walk_of
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import DecomposedDecoder, LoopTechnique
from lightning_amp.techniques.hic.rows import StrataParallel
from lightning_amp.techniques.ranks.sharded_region import SharedRegion, share_region


def share_strata(decoder: DecomposedDecoder, spec: StrataParallel, mesh: DeviceMesh) -> Change:
    """Shard the strata of a decoder over the model axis."""
    axis = mesh["model"]
    walk = walk_of(decoder, "strata", stacked=True)
    n_strata, ranks, rank = len(decoder.strata), axis.size(), axis.get_local_rank()
    ends = [int(part) if part.strip().isdigit() else -1 for part in spec.ends.split(",")]
    # a rank without strata would skip the backward pass, and the others would wait for it
    lengths = [end - start for start, end in pairwise([0, *ends])]
    if len(ends) != ranks or ends[-1] != n_strata or min(lengths) < 1:
        raise InstallError(
            f"strata got ends={spec.ends!r} on {ranks!r} ranks and {n_strata!r} strata; allowed is one past the"
            f" last stratum of every rank, each with one stratum at least: choose {n_strata!r} ranks or"
            f" fewer, and ends such as {','.join(str(n_strata * (r + 1) // ranks) for r in range(ranks))!r}"
        )
    own = range(ends[rank - 1] if rank else 0, ends[rank])
    swaps: dict[str, nn.Module] = {
        "region": share_region(decoder, SharedRegion(axis, ("strata",), summed=True)),
        "walk": OwnStrata(walk, own),
    }
    return Change(swaps, partial=list(decoder.strata.parameters()))


class OwnStrata(LoopTechnique):
    """Loop over the strata of this rank; made by `share_strata`."""

    def __init__(self, inner: nn.Module, own: range) -> None:
        super().__init__(inner)
        self.own = own

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"strata [{self.own.start}, {self.own.stop})"

    def forward(self, strata: nn.ModuleList, *latents: Tensor, **cells: Tensor) -> Scalar:
        """Return the negative log-likelihood, summed over cells and the features of the rank's own strata."""
        return cast(Tensor, self.inner(strata, *latents, own=self.own, **cells))
