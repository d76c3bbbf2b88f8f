"""S5: the hidden dimension of a decoder is sharded over the model axis; the strata run in step on all of them.

    region                               own channels of u and v enter (ranks/sharded_region.py)
    prenorm, postnorm                    own channels from own channels (linear_and_conv.py)
    qk, value, ff, or pairs              the same (linear_and_conv.py)
    attention                            scores of the own channels are summed, values stay (the model's `shard`);
                                         or keys and values are gathered first (key.py)
    decode                               scores of the own channels are summed; with S2 only for the rank's own features

Everything else of a stratum works on single numbers and needs no change. Exact up to the order of sums over ranks.

Collectives of one stratum with attention, and the numbers that a rank puts in; C chunks under S3, else 1:

                  forward                            backward                           S3 recomputes, in backward
    prenorm       all-gather         2 N + 1         all-reduce         2 N
    qk            reduce-scatter     R N d           all-gather         N d
    value         reduce-scatter     R N d           all-gather         N d
    key norms     all-reduce         N               all-reduce         N
    scores        C x all-reduce     3 w P in all    C x all-reduce     3 w P in all    C x all-reduce, 3 w P in all
    postnorm      all-gather         2 N + 1         all-reduce         2 N
    ff            reduce-scatter     2 R N d         all-gather         2 N d
    decode        all-reduce         B F_k
    together      7 + C              of which        6 + C                              + C

The form "paper" has no postnorm. With `gather`, key norms and scores need none, and attention one all-gather (2 N d)
and one reduce-scatter (2 R N d). With S2, decode has a reduce-scatter and an all-gather. Stratum 0 and strata with a
convolution have those of decode only. The region adds one all-gather of (B + N) d in the backward pass.
The paper's Table 5 counts 9 all-reduces forward where these are 8, and an all-reduce of a Linear's products moves twice
what the reduce-scatter moves.

What shrinks to 1/R: all [N, D] and [N, 2 D] tensors that are kept for the backward pass. What does not: the
probabilities [P, 3 w] of eager attention and all that belongs to features. Parameters stay whole; gradients of the
keys' parameters are parts (`Change.partial`).

Known limits: no second derivative; what a key does besides its children is probed on an example (checks/key.py), what a
stratum does besides its parts is not.
Legend: B cells, N anchors, P = N padded to whole buckets of w, D dim, d channels of a rank, F_k features of stratum k,
R ranks.
"""

from typing import cast

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.shapes import Counts, FeatureAnchor, OwnCounts
from lightning_amp.techniques.checks.decode import decode_problem
from lightning_amp.techniques.checks.same_function import shown
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import DecomposedDecoder
from lightning_amp.techniques.hic.hidden.key import refusal, share_key
from lightning_amp.techniques.hic.hidden.row import HiddenParallel
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.channel_shards import Channels, shard_channels
from lightning_amp.techniques.ranks.sharded_region import SharedRegion, share_region


class HiddenDecode(nn.Module):
    """A decode whose inner products are summed over the ranks' channels.

    Args:
        inner: A decode that is bilinear in cells and keys.
    """

    def __init__(self, inner: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner = inner
        self.mesh = mesh

    def forward(
        self,
        u: Float[Tensor, "cell own_dim"],
        key: Float[Tensor, "anchor own_dim"],
        feature_anchor: FeatureAnchor,
    ) -> Counts:
        """Scores of all features, replicated."""
        return collectives.leave(self.mesh, self.inner(u, key, feature_anchor))

    def scatter(
        self,
        u: Float[Tensor, "cell own_dim"],
        key: Float[Tensor, "anchor own_dim"],
        feature_anchor: FeatureAnchor,
        run: int,
    ) -> OwnCounts:
        """Scores of the features [rank * run, (rank + 1) * run); `feature_anchor` are those of all features."""
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank()
        assert ranks * run >= len(feature_anchor), (
            f"{ranks!r} runs of {run!r} do not hold {len(feature_anchor)!r} features"
        )
        part = cast(Tensor, self.inner(u, key, feature_anchor))
        filled = F.pad(part, (0, ranks * run - len(feature_anchor))).view(len(part), ranks, run)
        own = collectives.scatter(self.mesh, filled.movedim(1, 0))
        return own[:, : max(0, min(run, len(feature_anchor) - rank * run))]


def share_hidden(decoder: DecomposedDecoder, spec: HiddenParallel, mesh: DeviceMesh) -> Change:
    """Shard the hidden dimension of a decoder over the model axis.

    Raises:
        InstallError: Fewer pairs of channels than ranks, or a stratum with a part that
            cannot be sharded.
    """
    channels = shard_channels(decoder.dim, mesh["model"])
    swaps: dict[str, nn.Module] = {
        "region": share_region(decoder, SharedRegion(channels.mesh, ("S5",), channels=channels))
    }
    parameters: list[nn.Parameter] = []
    for k, stratum in enumerate(decoder.strata):
        fqn = f"strata.{k}"
        swaps[f"{fqn}.decode"] = _share_decode(stratum, fqn, channels)
        key = _key(stratum, fqn)
        if key is not None:
            swaps |= share_key(key, f"{fqn}.key", channels, gather=spec.gather)
            parameters += key.parameters()
    return Change(swaps, partial=parameters)


def _key(stratum: nn.Module, fqn: str) -> nn.Module | None:
    key = getattr(stratum, "key", "missing")
    if key is None or isinstance(key, nn.Module):
        return key
    raise refusal(f"{fqn}.key", f"is {shown(key)}", "a module, or None where the anchors are the keys")


def _share_decode(stratum: nn.Module, fqn: str, channels: Channels) -> HiddenDecode:
    decode = getattr(stratum, "decode", "missing")
    if isinstance(decode, HiddenDecode):
        problem = "which was sharded before"
    elif isinstance(decode, nn.Module):
        problem = decode_problem(decode)
    else:
        problem = "no module"
    if problem or not isinstance(decode, nn.Module):
        raise refusal(
            f"{fqn}.decode",
            f"is {shown(decode)}, {problem}",
            "a module without state for which decode(u, key, feature_anchor) is (u @ key.T)[:, feature_anchor]",
        )
    return HiddenDecode(decode, channels.mesh)
