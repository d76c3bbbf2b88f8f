"""Shard the hidden dimension of a decoder over the model axis; all ranks run each stratum together (S5).

    region                     own channels of u and v enter (ranks/sharded_region.py)
    prenorm, postnorm          own channels from own channels, normalised over all (sharding/normalise.py)
    qk, value, ff              y[:, I_r] = sum_q x[:, I_q] W[I_r, I_q]^T + bias[I_r], summed in blocks, one per receiver
    pairs                      y[I_r] = conv(x[I_r], weight[I_r]) + bias[I_r]: channels are independent
    attention                  scores of the own channels are summed, values stay (the model's `shard`); or keys and
                               values are gathered first
    decode                     scores of the own channels are summed; with S2 only for the rank's own features

All other parts of a stratum are elementwise and do not change. Exact up to the order of sums over ranks. An output of 2
D channels (gate and value of a GEGLU) has both halves of every own channel, so that a shard can be halved too.

Collectives of one stratum with attention, and the elements that a rank contributes; C chunks under S3, else 1:

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

The form "paper" has no postnorm. With `gather`, key norms and scores need no collective, and attention has one
all-gather (2 N d) and one reduce-scatter (2 R N d). With S2, decode has a reduce-scatter and an all-gather. Stratum 0
and strata with a convolution have only those of decode. The region adds one all-gather of (B + N) d in the backward
pass. By the paper's Table 5 these parts have 9 all-reduces forward (our sum; its text says up to 10) instead of these 8
collectives; an all-reduce of a Linear's products transfers twice as much as the reduce-scatter.

Reduced to 1/R: all [N, D] and [N, 2 D] tensors that are kept for the backward pass. Not reduced: the probabilities [P,
3 w] of eager attention, and all tensors of features. Parameters stay replicated; gradients of the keys' parameters are
partial (`Change.partial`).

Known limits: no second derivative. A part of a key that is not detected by name and structure raises an error. What a
key does outside its children is probed on an example (checks/key.py), but not what a stratum does outside its parts.
Legend: B cells, N anchors, P = N padded to full buckets of w, D dim, d channels of a rank, I_r those of rank r, F_k
features of stratum k, R ranks.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.shapes import Counts, FeatureAnchor, OwnCounts
from lightning_amp.sharding.normalise import normalised
from lightning_amp.sharding.splits import axis_of
from lightning_amp.techniques.checks.decoder import decode_problem
from lightning_amp.techniques.checks.key import channels_problem
from lightning_amp.techniques.checks.same_function import shown
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import (
    ATTENTION_KEY,
    CONVOLUTION_KEY,
    BucketedAttention,
    DecomposedDecoder,
    ShardableAttention,
)
from lightning_amp.techniques.hic.rows import HiddenParallel
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.sharded_region import SharedRegion, share_region
from lightning_amp.techniques.ranks.shards import Channels, gather_channels, shard_channels


class _Sharded(nn.Module):
    """A layer that computes its own channels only; it shares the state, hooks and mode of the original layer."""

    def __init__(self, whole: nn.Module, channels: Channels) -> None:
        # not a copy: optimisers and hooks refer to the original layer's parameters
        self.__dict__.update(whole.__dict__)
        self.channels = channels


class ShardedLinear(_Sharded, nn.Linear):
    """Linear layer that computes its own output channels from its own input channels."""

    def forward(self, input: Float[Tensor, "row own_dim"]) -> Float[Tensor, "row own_out"]:
        """Return the own channels of every group of D outputs, one group after the other."""
        columns = self.channels.select(self.weight).T
        # one block of weights per rank's outputs: the reduce-scatter leaves every rank the sum of its block
        blocks = torch.cat([self.channels.blocks(group) for group in self._groups(columns)], dim=-1)
        # a rank multiplies its input channels with the weights of all outputs, R blocks of [N, d]. These are partial
        # sums until the reduce-scatter, so the bias is added once, after it
        products = torch.bmm(input.expand(len(blocks), *input.shape), blocks)
        own = collectives.scatter(self.channels.mesh, products)
        width, widest = self.channels.width, self.channels.widest
        if width < widest:
            # blocks are padded to the channels of the widest rank
            own = torch.cat([group[:, :width] for group in torch.split(own, widest, dim=-1)], dim=-1)
        if self.bias is None:
            return own
        return own + torch.cat([self.channels.select(group) for group in self._groups(self.bias)])

    def _groups(self, values: Tensor) -> tuple[Tensor, ...]:
        return torch.split(values, self.channels.dim, dim=-1)


class ShardedConv1d(_Sharded, nn.Conv1d):
    """Depthwise convolution, padded with zeros, that computes its own channels."""

    def forward(self, input: Float[Tensor, "batch own_dim anchor"]) -> Float[Tensor, "batch own_dim to"]:
        """Convolve the own channels."""
        # `select` selects channels along the last dim
        weight = self.channels.select(self.weight.movedim(0, -1)).movedim(-1, 0)
        bias = None if self.bias is None else self.channels.select(self.bias)
        return F.conv1d(input, weight, bias, self.stride, self.padding, self.dilation, self.channels.width)


class ShardedLayerNorm(_Sharded, nn.LayerNorm):
    """LayerNorm that computes its own channels, normalised over all channels."""

    def forward(self, input: Float[Tensor, "row own_dim"]) -> Float[Tensor, "row own_dim"]:
        """Normalise over all ranks' channels."""
        tables = (self.weight, self.bias)
        # as rows, with an additional dim
        weight, bias = (None if t is None else self.channels.select(t)[None] for t in tables)
        axes = (axis_of(self.channels.mesh),)
        return normalised(input, weight, bias, dims=(1,), axes=axes, eps=self.eps)


CHANNELWISE = (nn.Identity, nn.LeakyReLU, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU)
"""Elementwise layers without parameters."""


def share_key(key: nn.Module, fqn: str, channels: Channels, *, gather: bool) -> dict[str, nn.Module]:
    """Return replacements for the children of a key, by name; with `gather`, attention gathers all channels."""
    # not named_children, which lists a module with two names only once
    children = {name: child for name, child in key._modules.items() if child is not None}
    own = [name for name, _ in (*key.named_parameters(recurse=False), *key.named_buffers(recurse=False))]
    if set(children) not in (set(ATTENTION_KEY), set(CONVOLUTION_KEY)) or own:
        raise refusal(
            fqn,
            f"is {type(key).__name__!r} with the children {list(children)!r} and the state {own!r}",
            f"the children {ATTENTION_KEY!r} or {CONVOLUTION_KEY!r}, and no state except theirs",
        )
    swaps: dict[str, nn.Module] = {}
    dim = channels.dim
    for name, child in cast(dict[str, Any], children).items():
        # not isinstance: a subclass may compute something else
        path, kind = f"{fqn}.{name}", type(child)
        if name == "attention":
            swaps |= _share_attention(child, path, channels, gather=gather)
        elif name in ("prenorm", "postnorm"):
            if kind is nn.LayerNorm and child.normalized_shape == (dim,):
                swaps[path] = ShardedLayerNorm(child, channels)
            elif kind is not nn.Identity:
                raise refusal(path, f"is {shown(child)}", f"nn.LayerNorm({dim}) or nn.Identity()")
        elif name == "pairs":
            sizes = [getattr(child, size, None) for size in ("in_channels", "out_channels", "groups")]
            if kind is not nn.Conv1d or sizes != [dim] * 3 or child.padding_mode != "zeros":
                allowed = f"a depthwise nn.Conv1d of {dim} channels, padded with zeros"
                raise refusal(path, f"is {shown(child)}", allowed)
            swaps[path] = ShardedConv1d(child, channels)
        elif name == "activation":
            if kind not in CHANNELWISE:
                raise refusal(path, f"is {shown(child)}", f"one of {[one.__name__ for one in CHANNELWISE]!r}")
        else:
            shape = (dim, 2 * dim if name == "ff" else dim)
            if kind is not nn.Linear or (child.in_features, child.out_features) != shape:
                raise refusal(path, f"is {shown(child)}", f"nn.Linear{shape!r}")
            swaps[path] = ShardedLinear(child, channels)
    # any two ranks have different channels; the first and the last rank are checked, so that all ranks agree
    problem = channels_problem(key, channels.dim, channels.of(0), channels.of(channels.mesh.size() - 1))
    if problem:
        raise refusal(
            fqn,
            f"is {type(key).__name__!r} and {problem}",
            "a key without hooks that computes with its children and with elementwise functions only",
        )
    return swaps


def refusal(fqn: str, found: str, allowed: str) -> InstallError:
    """Return the error for a part that cannot be sharded."""
    return InstallError(
        f"S5 cannot shard the channels of {fqn!r}, which {found}; allowed is {allowed}: change it, or leave S5 out"
    )


def _share_attention(attention: nn.Module, fqn: str, channels: Channels, *, gather: bool) -> dict[str, nn.Module]:
    """Shard the outermost attention that supports it; S3 may have wrapped it."""
    found = [(name, m) for name, m in attention.named_modules() if isinstance(m, ShardableAttention)]
    if not found or not channels.paired:
        raise refusal(
            fqn,
            f"is {shown(attention)} with D={channels.dim!r}",
            "attention with n_buckets, prepare, attend and shard(pairs, total), for an even D",
        )
    name, inner = found[0]
    total = partial(collectives.total, channels.mesh)
    path = f"{fqn}.{name}" if name else fqn
    if gather:
        return {path: GatheredAttention(attention.get_submodule(name), channels)}
    return {path: inner.shard(channels.pairs, total)}


CellChannels = Float[Tensor, "cell own_dim"]
AnchorChannels = Float[Tensor, "anchor own_dim"]


class GatheredAttention(nn.Module):
    """Bucketed attention over all channels that returns the own ones: the paper's form without S4.

    Forward has one all-gather of queries-and-keys and values, 2 N d elements per rank, backward one reduce-scatter of 2
    R N d; no scores are summed. The gathered tensors [2 N, D] are kept for the backward pass: the form exists to
    measure that.
    """

    inner: BucketedAttention

    def __init__(self, inner: nn.Module, channels: Channels) -> None:
        super().__init__()
        self.inner = cast(Any, inner)
        self.channels = channels

    def n_buckets(self, n: int) -> int:
        """Return the number of buckets that n anchors fill."""
        return self.inner.n_buckets(n)

    def prepare(self, q: AnchorChannels, k: AnchorChannels, values: AnchorChannels) -> tuple[Tensor, ...]:
        """Gather all ranks' channels, and return the state for `attend`."""
        parts = [q, values] if q is k else [q, k, values]
        whole = torch.split(gather_channels(self.channels, torch.cat(parts)), len(q))
        return self.inner.prepare(whole[0], whole[-2], whole[-1])

    def attend(self, state: tuple[Tensor, ...], first: int, last: int) -> Float[Tensor, "row own_dim"]:
        """Return own channels of the rows of the buckets [first, last)."""
        return self.channels.select(self.inner.attend(state, first, last))

    def forward(self, q: AnchorChannels, k: AnchorChannels, values: AnchorChannels) -> AnchorChannels:
        """Compute attention of all buckets at once."""
        return self.attend(self.prepare(q, k, values), 0, self.n_buckets(len(q)))[: len(q)]


class HiddenDecode(nn.Module):
    """Decode whose inner products are summed over the ranks' channels."""

    def __init__(self, inner: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner = inner
        self.mesh = mesh

    def forward(self, u: CellChannels, key: AnchorChannels, feature_anchor: FeatureAnchor) -> Counts:
        """Return scores of all features, replicated."""
        return collectives.leave(self.mesh, self.inner(u, key, feature_anchor))

    def scatter(self, u: CellChannels, key: AnchorChannels, feature_anchor: FeatureAnchor, run: int) -> OwnCounts:
        """Return scores of the features [rank * run, (rank + 1) * run); `feature_anchor` has all features."""
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank()
        assert ranks * run >= len(feature_anchor), (
            f"{ranks!r} runs of {run!r} do not hold {len(feature_anchor)!r} features"
        )
        part = cast(Tensor, self.inner(u, key, feature_anchor))
        # the last runs may be short or empty, and a reduce-scatter requires equal blocks: zeros are added and removed
        # again
        filled = F.pad(part, (0, ranks * run - len(feature_anchor))).view(len(part), ranks, run)
        own = collectives.scatter(self.mesh, filled.movedim(1, 0))
        return own[:, : max(0, min(run, len(feature_anchor) - rank * run))]


def share_hidden(decoder: DecomposedDecoder, spec: HiddenParallel, mesh: DeviceMesh) -> Change:
    """Shard the hidden dimension of a decoder over the model axis."""
    channels = shard_channels(decoder.dim, mesh["model"])
    swaps: dict[str, nn.Module] = {
        "region": share_region(decoder, SharedRegion(channels.mesh, ("S5",), channels=channels))
    }
    parameters: list[nn.Parameter] = []
    for k, stratum in enumerate(decoder.strata):
        fqn = f"strata.{k}"
        decode = getattr(stratum, "decode", "missing")
        problem = "which was sharded before" if isinstance(decode, HiddenDecode) else "no module"
        if isinstance(decode, nn.Module) and not isinstance(decode, HiddenDecode):
            problem = decode_problem(decode)
        if problem or not isinstance(decode, nn.Module):
            raise refusal(
                f"{fqn}.decode",
                f"is {shown(decode)}, {problem}",
                "a module without state for which decode(u, key, feature_anchor) is (u @ key.T)[:, feature_anchor]",
            )
        swaps[f"{fqn}.decode"] = HiddenDecode(decode, channels.mesh)
        key = getattr(stratum, "key", "missing")
        if not (key is None or isinstance(key, nn.Module)):
            raise refusal(f"{fqn}.key", f"is {shown(key)}", "a module, or None where the anchors are the keys")
        if key is not None:
            swaps |= share_key(key, f"{fqn}.key", channels, gather=spec.gather)
            parameters += key.parameters()
    return Change(swaps, partial=parameters)
