"""Shard the children of a stratum's key, detected by name and structure, over channels (S5).

What is not detected is refused: a part left as it is would compute with some channels as if they were all. What a key
does besides its children is probed (checks/key.py).
Legend: D dim.
"""

from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_amp.errors import InstallError
from lightning_amp.techniques.checks.key import channels_problem
from lightning_amp.techniques.checks.same_function import shown
from lightning_amp.techniques.contract.protocol import (
    ATTENTION_KEY,
    CONVOLUTION_KEY,
    BucketedAttention,
    ShardableAttention,
)
from lightning_amp.techniques.hic.hidden.linear_and_conv import ShardedConv1d, ShardedLayerNorm, ShardedLinear
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.channel_shards import Channels, gather_channels

CHANNELWISE = (nn.Identity, nn.LeakyReLU, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU)
"""Layers without parameters that work on single numbers."""


def share_key(key: nn.Module, fqn: str, channels: Channels, *, gather: bool) -> dict[str, nn.Module]:
    """New children of a key, by name.

    Args:
        gather: Whether attention reads the keys and values of all channels.

    Raises:
        InstallError: A child is missing, too many, or none that can be sharded; or the key has state, or mixes
            channels by itself.
    """
    # not named_children: it leaves out a module that has two names
    children = {name: child for name, child in key._modules.items() if child is not None}
    own = [name for name, _ in (*key.named_parameters(recurse=False), *key.named_buffers(recurse=False))]
    if set(children) not in (set(ATTENTION_KEY), set(CONVOLUTION_KEY)) or own:
        raise refusal(
            fqn,
            f"is {type(key).__name__!r} with the children {list(children)!r} and the state {own!r}",
            f"the children {ATTENTION_KEY!r} or {CONVOLUTION_KEY!r}, and no state except theirs",
        )
    swaps: dict[str, nn.Module] = {}
    for name, child in children.items():
        path = f"{fqn}.{name}"
        if name == "attention":
            swaps |= _share_attention(child, path, channels, gather=gather)
        elif name in ("prenorm", "postnorm"):
            swaps |= _share_norm(child, path, channels)
        elif name == "pairs":
            swaps[path] = _share_convolution(child, path, channels)
        elif name == "activation":
            _check_activation(child, path)
        else:
            swaps[path] = _share_linear(child, path, channels, groups=2 if name == "ff" else 1)
    # any two ranks have other channels, and these two have the same ones for every rank that asks
    problem = channels_problem(key, channels.dim, channels.of(0), channels.of(channels.mesh.size() - 1))
    if problem:
        raise refusal(
            fqn,
            f"is {type(key).__name__!r} and {problem}",
            "a key without hooks that computes with its children and with elementwise functions only",
        )
    return swaps


def refusal(fqn: str, found: str, allowed: str) -> InstallError:
    """The error for a part that cannot be sharded."""
    return InstallError(
        f"S5 cannot shard the channels of {fqn!r}, which {found}; allowed is {allowed}: change it, or leave"
        " S5 out"
    )


def _share_attention(
    attention: nn.Module, fqn: str, channels: Channels, *, gather: bool
) -> dict[str, nn.Module]:
    """The outermost attention that can be sharded; S3 may have wrapped it."""
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


def _share_norm(norm: nn.Module, fqn: str, channels: Channels) -> dict[str, nn.Module]:
    if type(norm) is nn.Identity:
        return {}
    # not isinstance: a subclass may compute something else
    if type(norm) is not nn.LayerNorm or norm.normalized_shape != (channels.dim,):
        raise refusal(fqn, f"is {shown(norm)}", f"nn.LayerNorm({channels.dim}) or nn.Identity()")
    return {fqn: ShardedLayerNorm(norm, channels)}


def _share_linear(linear: nn.Module, fqn: str, channels: Channels, *, groups: int) -> ShardedLinear:
    shape = (channels.dim, groups * channels.dim)
    if type(linear) is not nn.Linear or (linear.in_features, linear.out_features) != shape:
        raise refusal(fqn, f"is {shown(linear)}", f"nn.Linear{shape!r}")
    return ShardedLinear(linear, channels)


def _share_convolution(pairs: nn.Module, fqn: str, channels: Channels) -> ShardedConv1d:
    dims = (channels.dim,) * 3
    if (
        type(pairs) is not nn.Conv1d
        or (pairs.in_channels, pairs.out_channels, pairs.groups) != dims
        or pairs.padding_mode != "zeros"
    ):
        raise refusal(
            fqn, f"is {shown(pairs)}", f"a depthwise nn.Conv1d of {channels.dim} channels, padded with zeros"
        )
    return ShardedConv1d(pairs, channels)


def _check_activation(activation: nn.Module, fqn: str) -> None:
    if type(activation) not in CHANNELWISE:
        raise refusal(fqn, f"is {shown(activation)}", f"one of {[kind.__name__ for kind in CHANNELWISE]!r}")


OwnChannels = Float[Tensor, "anchor own_dim"]


class GatheredAttention(nn.Module):
    """Bucketed attention over all channels that returns the own ones: the paper's form without S4.

        rows[:, I_r] = attend(prepare(q, k, values), first, last)[:, I_r]         I_r the channels of rank r

    Collectives: forward one all-gather of queries-and-keys and values, 2 N d numbers per rank, backward one
    reduce-scatter of 2 R N d; no scores are summed. What grows: the gathered tensors [2 N, D], and what is made of
    them, stay for the backward pass on every rank, which is what the form is measured for.
    """

    inner: BucketedAttention

    def __init__(self, inner: nn.Module, channels: Channels) -> None:
        super().__init__()
        self.inner = cast(Any, inner)
        self.channels = channels

    def n_buckets(self, n: int) -> int:
        """Buckets that n anchors fill."""
        return self.inner.n_buckets(n)

    def prepare(self, q: OwnChannels, k: OwnChannels, values: OwnChannels) -> tuple[Tensor, ...]:
        """What `attend` reads, from all ranks' channels."""
        parts = [q, values] if q is k else [q, k, values]
        whole = torch.split(gather_channels(self.channels, torch.cat(parts)), len(q))
        return self.inner.prepare(whole[0], whole[-2], whole[-1])

    def attend(self, state: tuple[Tensor, ...], first: int, last: int) -> Float[Tensor, "row own_dim"]:
        """Own channels of the rows of the buckets [first, last)."""
        return self.channels.select(self.inner.attend(state, first, last))

    def forward(self, q: OwnChannels, k: OwnChannels, values: OwnChannels) -> OwnChannels:
        """Attention over all buckets at once."""
        return self.attend(self.prepare(q, k, values), 0, self.n_buckets(len(q)))[: len(q)]
