"""Shard the anchors of a decoder: each rank computes the keys and features of a run of anchors (nodes).

    region        own rows of v enter, losses are summed (ranks/sharded_region.py, ranks/shards.py); v has only own
                  rows if the graph's vertices are sharded too (graph_encoder.py)
    attention     own buckets with both neighbours on this rank: attend(prepare(own q, k, values)); the first and the
                  last one: attend(prepare(three buckets, including the neighbour's)), one bucket of it
    full          keys and values pass a ring of ranks; no rank has scores [N, N], nor those of more than two ranks
    features      those of the own anchors; the softmax runs over all ranks' features

All other parts of a key work row by row and do not change, nor does a chained spine. Exact up to the order of sums over
ranks. Anchors are sharded in full buckets, as evenly as possible; with full attention one by one. Rows are in transit
while the inner buckets are computed: `start_exchange` starts to send in the forward pass and waits in the backward
pass, `finish_exchange` waits in the forward pass and starts to send gradients in the backward pass. S3 computes chunks
in any order, so the exchange finishes before the first chunk.

    collectives of a step               forward                      backward
    every stratum, local attention      1 all-to-all  4 w D          1 all-to-all  4 w D      (ends: half of it)
    every stratum, full attention       2 (R - 1) all-to-all  n D    4 R - 2 all-to-all  n D
    every stratum (not binarized)       1 all-gather  B              1 all-reduce  B
    complete decoder                    1 all-reduce  1              1 all-gather  n D + B D + K
    the same, if v has own rows only    1 all-reduce  1              1 all-reduce  B D + K
    parameters of the strata                                         in the reduction of gradients, once

The numbers are elements that a rank contributes. Under `recompute` those of a forward pass come twice, under `stream`
those of the softmax once per micro-batch. Reduced to 1 / R: keys, scores, likelihood, and time. Parameters stay
replicated; their gradients are partial (`Change.partial`).

Legend: B cells, N anchors, n own anchors, w anchors of a bucket, own buckets 0 .. W - 1, D dim, K strata, R ranks;
before, after: the bucket of the previous and of the next rank. Known limits: second derivatives raise an error; what a
key does outside its children is probed on an example (checks/key.py), but not what a stratum does outside its parts;
every rank draws its own random numbers inside the strata.
"""

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.shapes import FeatureAnchor, PerAnchor
from lightning_amp.sharding.attention.ring import ring_attention
from lightning_amp.sharding.collectives import wait_for
from lightning_amp.sharding.sharded_tensor import computed_in
from lightning_amp.sharding.splits import axis_of
from lightning_amp.techniques.checks.key import full_problem, rows_problem
from lightning_amp.techniques.checks.same_function import close, failure
from lightning_amp.techniques.contract.change import Change, hooks_within
from lightning_amp.techniques.contract.protocol import ATTENTION_KEY, BucketedAttention, DecomposedDecoder
from lightning_amp.techniques.hic.attention.sizes import check_rows
from lightning_amp.techniques.hic.features import ShardedFeatures, features_problem
from lightning_amp.techniques.hic.rows import DomainParallel
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.sharded_region import SharedRegion, share_region
from lightning_amp.techniques.ranks.shards import AnchorShards, run_of, shard_anchors


def start_exchange(rows: AnchorShards, edges: Sequence[Float[Tensor, "_ two_dim"]]) -> Float[Tensor, "halo two_dim"]:
    """Start to send keys and values, concatenated, to the neighbours; pass the result only to `finish_exchange`.

    Every rank must call it. `edges`: the first own bucket for the previous rank, and the last for the next rank, if
    these ranks exist.
    """
    # the last bucket of the sequence may be short; autograd requires as many rows back as were sent
    sent = torch.cat([F.pad(edge, (0, 0, 0, rows.window - len(edge))) for edge in edges])
    return collectives.linear(partial(_exchange, rows), wait_for, sent)


def finish_exchange(
    rows: AnchorShards, under_way: Float[Tensor, "halo two_dim"]
) -> tuple[Float[Tensor, "before two_dim"], Float[Tensor, "after two_dim"]]:
    """Return keys and values of the bucket before, and of the bucket after; empty at an end of the sequence."""
    back = partial(_exchange, rows)
    received: Tensor = collectives.linear(lambda x: wait_for(x).view_as(x), back, under_way)
    n_before = rows.window * rows.before
    return received[:n_before], received[n_before:][: rows.bounds[-1] - rows.own.stop]


def _exchange(rows: AnchorShards, sent: Tensor) -> Tensor:
    """Exchange a bucket with each neighbour; wait before reading the result."""
    own = rows.mesh.get_local_rank()
    sizes = [rows.window if abs(rank - own) == 1 else 0 for rank in range(len(rows.sizes))]
    return collectives.start_exchange(rows.mesh, sent, sizes, sizes)


State = tuple[Tensor, ...]


class _OwnAnchors(nn.Module):
    """Base class of attention of the own anchors."""

    def __init__(self, anchors: AnchorShards) -> None:
        super().__init__()
        self.anchors = anchors

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        own = self.anchors.own
        return f"anchors [{own.start}, {own.stop}) of {self.anchors.bounds[-1]}, ranks={self.anchors.mesh.size()}"


class HaloAttention(_OwnAnchors):
    """Bucketed attention of a run of buckets between those of other ranks; made by `share_anchors`."""

    inner: BucketedAttention

    def __init__(self, inner: nn.Module, anchors: AnchorShards) -> None:
        super().__init__(anchors)
        self.inner = cast(Any, inner)
        # at an end of the sequence the outer bucket does not wait for rows of another rank
        self.inside = range(anchors.before, max(anchors.n_buckets - anchors.after, anchors.before))
        self.outer = [j for j in range(anchors.n_buckets) if j not in self.inside]

    def n_buckets(self, n: int) -> int:
        """Return the number of buckets that n anchors fill."""
        return self.inner.n_buckets(n)

    def forward(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> PerAnchor:
        """Compute attention of all own buckets; the inner ones while the neighbours' rows are in transit."""
        if not self.outer:
            return cast(Any, self.inner)(q, k, values)  # type: ignore[no-any-return]
        near = self._near(q, k, values)
        under_way = self._send(near)
        inside = self._inside(self.inner.prepare(q, k, values), self.inside) if self.inside else []
        pieces = self._pieces(near, under_way)
        return self._in_order(dict(zip(self.outer, pieces, strict=True)), inside)[: len(q)]

    def prepare(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> State:
        """Return the state for `attend`: that of the own rows, then that of the rows around every outer bucket."""
        own = self.inner.prepare(q, k, values)
        if not self.outer:
            return own
        near = self._near(q, k, values)
        pieces = self._pieces(near, self._send(near))
        return tuple(tensor for state in (own, *pieces) for tensor in state)

    def attend(self, state: State, first: int, last: int) -> Float[Tensor, "row dim"]:
        """Return rows of the own buckets [first, last)."""
        length = len(state) // (1 + len(self.outer))
        own, *pieces = (state[i : i + length] for i in range(0, len(state), length))
        inside = {j: piece for j, piece in zip(self.outer, pieces, strict=True) if first <= j < last}
        buckets = range(max(first, self.inside.start), min(last, self.inside.stop))
        return self._in_order(inside, self._inside(own, buckets))

    def _inside(self, state: State, buckets: range) -> list[Tensor]:
        return [self.inner.attend(state, buckets.start, buckets.stop)] if buckets else []

    def _in_order(self, pieces: dict[int, State], inside: list[Tensor]) -> Tensor:
        """Concatenate rows of the requested outer buckets and of the buckets between them."""
        # index of an outer bucket in its piece: the first bucket of the sequence has no bucket before it, so it is the
        # first of its piece, and its scores before the sequence are masked as on one device
        places = {j: int(j > 0 or self.anchors.before) for j in pieces}
        rows = {j: self.inner.attend(piece, places[j], places[j] + 1) for j, piece in pieces.items()}
        first = self.inside.start
        before, after = ([r for j, r in rows.items() if (j < first) == side] for side in (True, False))
        return torch.cat([*before, *inside, *after])

    def _near(self, *own: Tensor) -> list[State]:
        """Return own rows of q, k and values around every outer bucket."""
        w = self.anchors.window
        # a bucket and its two neighbours, so that `prepare` uses positions with the same differences as on one device
        around = [slice(max(j - 1, 0) * w, (j + 2) * w) for j in self.outer]
        return [tuple(rows[part] for rows in own) for part in around]

    def _send(self, near: list[State]) -> Tensor:
        w, (_, *first), (_, *last) = self.anchors.window, near[0], near[-1]
        # the first own bucket goes to the previous rank, the last to the next rank; a single bucket goes to both
        edges = [[x[:w] for x in first]] * self.anchors.before + [[x[-w:] for x in last]] * self.anchors.after
        return start_exchange(self.anchors, [torch.cat(edge, dim=1) for edge in edges])

    def _pieces(self, near: list[State], under_way: Tensor) -> list[State]:
        """Wait for the neighbours' rows, and return the state of every outer bucket with its neighbours."""
        before, after = finish_exchange(self.anchors, under_way)
        pieces = list[State]()
        for j, (q, k, values) in zip(self.outer, near, strict=True):
            dim = k.shape[1]
            first = before if j == 0 else before[:0]
            last = after if j == self.anchors.n_buckets - 1 else before[:0]
            # queries of the neighbours' rows are not used; under autocast, keys and values were sent as one dtype
            keys = torch.cat((first[:, :dim].to(k.dtype), k, last[:, :dim].to(k.dtype)))
            values = torch.cat((first[:, dim:].to(values.dtype), values, last[:, dim:].to(values.dtype)))
            pieces.append(self.inner.prepare(F.pad(q, (0, 0, len(first), len(last))), keys, values))
        return pieces


class RingAttention(_OwnAnchors):
    """Attention of the own anchors to all anchors; made by `share_anchors`."""

    def forward(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> PerAnchor:
        """Compute attention for the rows of the own anchors."""
        check_rows(q, k, values)
        # autocast does not apply to the kernels of a block
        rows = [computed_in(x)[None, None] for x in (q, k, values)]
        owned = self.anchors.owned
        axis, scale = axis_of(self.anchors.mesh), q.shape[1] ** -0.5
        return ring_attention(*rows, axis=axis, rows=owned, columns=owned, scale=scale)[0, 0]


ROW_BY_ROW = (nn.LayerNorm, nn.Linear, nn.Identity)
EXAMPLE_WINDOW = 3


def share_anchors(decoder: DecomposedDecoder, spec: DomainParallel, mesh: DeviceMesh) -> Change:
    """Shard the anchors of a decoder over the model axis."""
    found = [_attention(decoder, k) for k in range(len(decoder.strata))]
    attentions = dict(one for one in found if one is not None)
    windows = {_window(decoder, fqn, attention) for fqn, attention in attentions.items()}
    if len(windows) != 1:
        raise _refusal(
            decoder, f"has buckets of {sorted(windows)!r} anchors", "strata with attention, all of one window"
        )
    anchors = shard_anchors(decoder.n_anchors, windows.pop(), mesh["model"])
    region = SharedRegion(anchors.mesh, ("nodes",), summed=True, anchors=anchors, given=spec.vertices)
    swaps: dict[str, nn.Module] = {"region": share_region(decoder, region)}
    for fqn, attention in attentions.items():
        local = isinstance(attention, BucketedAttention)
        swaps[fqn] = HaloAttention(attention, anchors) if local else RingAttention(anchors)
    for k, stratum in enumerate(decoder.strata):
        problem = features_problem(stratum)
        if problem:
            raise _refusal(
                decoder, f"has a stratum {k!r} that {problem}", "`features` without state that hands all features on"
            )
        swaps[f"strata.{k}.features"] = AnchorFeatures(stratum.get_buffer("feature_anchor"), anchors)
    return Change(swaps, partial=list(decoder.strata.parameters()))


def _attention(decoder: DecomposedDecoder, k: int) -> tuple[str, nn.Module] | None:
    """Return name and module of a stratum's full or outermost bucketed attention, maybe inside S3's; None if no key."""
    fqn = f"strata.{k}.key"
    key: Any = getattr(decoder.strata[k], "key", "missing")
    if key is None:
        return None
    # not named_children, which lists a module with two names only once
    children = dict(key._modules) if isinstance(key, nn.Module) else {}
    others = [child for name, child in children.items() if name != "attention"]
    state = children and [*key.parameters(recurse=False), *key.buffers(recurse=False)]
    if set(children) != set(ATTENTION_KEY) or not all(map(_is_row_by_row, others)) or state:
        raise _refusal(
            decoder,
            f"has {fqn!r} {key!r}",
            f"a key that has no state itself, with the children {ATTENTION_KEY!r}, all but attention of the"
            f" types {[kind.__name__ for kind in ROW_BY_ROW]!r} and without hooks",
        )
    outer = cast(nn.Module, children["attention"])
    named = ((name, module) for name, module in outer.named_modules() if isinstance(module, BucketedAttention))
    found = next(named, ("", outer))
    unlike_full = "" if isinstance(found[1], BucketedAttention) else full_problem(outer)
    if unlike_full:
        raise _refusal(
            decoder,
            f"has '{fqn}.attention' {outer!r}",
            "attention with n_buckets, prepare and attend, or full attention, softmax(q k^T D^-0.5) values, and this"
            f" {unlike_full}",
        )
    problem = rows_problem(key, decoder.dim)
    if problem:
        raise _refusal(
            decoder,
            f"has {fqn!r} {type(key).__name__!r} that {problem}",
            "a key without hooks that computes row by row, except for attention",
        )
    return ".".join(part for part in (fqn, "attention", found[0]) if part), cast(nn.Module, found[1])


def _is_row_by_row(child: nn.Module | None) -> bool:
    # not isinstance: a subclass may compute something else
    known = type(child) in ROW_BY_ROW and len(getattr(child, "normalized_shape", "1")) == 1
    return known and not hooks_within(cast(nn.Module, child))


def _window(decoder: DecomposedDecoder, fqn: str, attention: nn.Module) -> int:
    """Return the number of anchors per bucket, if buckets attend to both neighbours only; for full attention 1."""
    if not isinstance(attention, BucketedAttention):
        return 1
    window: Any = getattr(attention, "window", None)
    fits = isinstance(window, int) and window > 0
    if not fits or [attention.n_buckets(n) for n in (window, window + 1)] != [1, 2]:
        raise _refusal(decoder, f"has {fqn!r} with window={window!r}", "attention with buckets of `window` anchors")
    hooks = hooks_within(attention)
    if hooks:
        raise _refusal(decoder, f"has {fqn!r} with {hooks!r}, which would not run", "attention without hooks")
    # small buckets keep the example small
    small = cast(Any, copy.deepcopy(attention))
    small.window = w = min(window, EXAMPLE_WINDOW)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 5 * w, decoder.dim, generator=generator, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            alone = small.attend(small.prepare(*rows[:, w : 4 * w]), 1, 2)
            among = small.attend(small.prepare(*rows), 2, 3)
        local = alone.shape == rows[0, :w].shape and close(alone, among, rtol=1e-8)
    except Exception as error:
        raise _refusal(
            decoder, f"has {fqn!r} that fails on an example with {failure(error)}", "bucketed attention"
        ) from error
    if not local:
        raise _refusal(
            decoder,
            f"has {fqn!r} whose buckets depend on other buckets than their two neighbours, or on their place",
            "attention between neighbouring buckets",
        )
    return cast(int, window)


def _refusal(decoder: object, found: str, allowed: str) -> InstallError:
    return InstallError(
        f"nodes does not support {type(decoder).__name__!r}, which {found}; allowed is {allowed}: change it,"
        " or leave 'nodes' out"
    )


class AnchorFeatures(ShardedFeatures):
    """Features of a stratum that belong to this rank's anchors; made by `share_anchors`.

    Consecutive own columns, as with ascending anchors, are sliced without a copy; others are gathered.
    """

    def __init__(self, feature_anchor: FeatureAnchor, anchors: AnchorShards) -> None:
        nn.Module.__init__(self)
        self.mesh, self.n_features = anchors.mesh, len(feature_anchor)
        firsts = torch.tensor(anchors.bounds[1:-1], dtype=feature_anchor.dtype, device=feature_anchor.device)
        # a feature is on the rank of its anchor; the sort is stable, so that a rank keeps the order of its features
        owner = torch.bucketize(feature_anchor, firsts, right=True)
        order = owner.argsort(stable=True)
        self.sizes = owner.bincount(minlength=len(anchors.sizes)).tolist()
        rank = anchors.mesh.get_local_rank()
        first = list(accumulate(self.sizes, initial=0))[rank]
        columns = order[first : first + self.sizes[rank]]
        # always the same tensor: S4 reads the values of a new tensor, which waits for the device
        self.register_buffer("feature_anchor", feature_anchor[columns] - anchors.own.start, persistent=False)
        self.run = run_of(columns)
        self.register_buffer("columns", columns.clone() if self.run is None else None, persistent=False)
        ascending = run_of(order) is not None
        self.register_buffer("places", None if ascending else order.argsort(), persistent=False)
