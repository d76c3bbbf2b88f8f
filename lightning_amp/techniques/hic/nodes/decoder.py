"""nodes: every rank of the model axis has a run of the anchors, and computes keys and features of these.

    region        own rows of v enter, losses are added up (ranks/sharded_region.py, ranks/anchor_shards.py); v has no
                  others where the graph's vertices are sharded too (graph_encoder.py)
    attention     local, with a bucket of rows of each neighbouring rank; full: keys and values of all ranks pass by
    features      those of the own anchors; the softmax runs over all ranks' features

Everything else of a key works row by row and needs no change, nor does a chained spine. Exact up to the order of the
sums over ranks. Anchors are sharded in whole buckets, as evenly as they go; with full attention one by one.

    collectives of a step               forward                      backward
    every stratum, local attention      1 all-to-all  4 w D          1 all-to-all  4 w D      (ends: half of it)
    every stratum, full attention       2 (R - 1) all-to-all  n D    4 R - 2 all-to-all  n D
    every stratum (not binarized)       1 all-gather  B              1 all-reduce  B
    the whole decoder                   1 all-reduce  1              1 all-gather  n D + B D + K
    the same, v given by its own rows   1 all-reduce  1              1 all-reduce  B D + K
    parameters of the strata                                         in the reduction of gradients, once

The numbers are those that a rank puts in; under `recompute` those of a forward pass come twice, under `stream` those of
the softmax once for every micro-batch. What shrinks to a part of 1 / R: everything of a key, scores, likelihood, and
time. Parameters stay whole; their gradients are parts (`Change.partial`).

Legend: B cells, N anchors, n own anchors, w anchors of a bucket, D dim, K strata, R ranks.
Known limits: second derivatives are refused; what a key does besides its children is probed on an example
(checks/key.py), what a stratum does besides its parts is not; random draws inside of the strata are each rank's own.
"""

import copy
import warnings
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.shapes import FeatureAnchor
from lightning_amp.techniques.checks.key import rows_problem
from lightning_amp.techniques.checks.reach import full_problem
from lightning_amp.techniques.checks.same_function import failure
from lightning_amp.techniques.contract.change import Change, hooks_within
from lightning_amp.techniques.contract.protocol import ATTENTION_KEY, BucketedAttention, DecomposedDecoder
from lightning_amp.techniques.hic.features import ShardedFeatures, features_problem
from lightning_amp.techniques.hic.nodes.halo_attention import HaloAttention, RingAttention
from lightning_amp.techniques.hic.rows import DomainParallel
from lightning_amp.techniques.ranks.anchor_shards import AnchorShards, shard_anchors
from lightning_amp.techniques.ranks.sharded_region import SharedRegion, share_region

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
                decoder,
                f"has a stratum {k!r} that {problem}",
                "`features` without state that hands all features on",
            )
        swaps[f"strata.{k}.features"] = AnchorFeatures(stratum.get_buffer("feature_anchor"), anchors)
    return Change(swaps, partial=list(decoder.strata.parameters()))


def _attention(decoder: DecomposedDecoder, k: int) -> tuple[str, nn.Module] | None:
    """Name and module of a stratum's full attention, or outermost bucketed one, in which S3 may have wrapped it."""
    fqn = f"strata.{k}.key"
    key: Any = getattr(decoder.strata[k], "key", "missing")
    if key is None:
        return None
    # not named_children: it leaves out a module that has two names
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
    named = (
        (name, module) for name, module in outer.named_modules() if isinstance(module, BucketedAttention)
    )
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
    """Anchors of a bucket, if attention sees the two neighbouring buckets of a bucket and no others; of full one 1."""
    if not isinstance(attention, BucketedAttention):
        return 1
    window: Any = getattr(attention, "window", None)
    fits = isinstance(window, int) and window > 0
    if not fits or [attention.n_buckets(n) for n in (window, window + 1)] != [1, 2]:
        raise _refusal(
            decoder, f"has {fqn!r} with window={window!r}", "attention with buckets of `window` anchors"
        )
    hooks = hooks_within(attention)
    if hooks:
        raise _refusal(decoder, f"has {fqn!r} with {hooks!r}, which would not run", "attention without hooks")
    # with small buckets the example is small
    small = cast(Any, copy.deepcopy(attention))
    small.window = w = min(window, EXAMPLE_WINDOW)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 5 * w, decoder.dim, generator=generator, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            alone = small.attend(small.prepare(*rows[:, w : 4 * w]), 1, 2)
            among = small.attend(small.prepare(*rows), 2, 3)
        local = alone.shape == rows[0, :w].shape and torch.allclose(alone, among, rtol=1e-8)
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
    """The part of a stratum's features that belongs to this rank's anchors; made by `share_anchors`.

    Where the own columns are a run, as when the anchors ascend, they are sliced, which costs nothing; else gathered.
    """

    def __init__(self, feature_anchor: FeatureAnchor, anchors: AnchorShards) -> None:
        nn.Module.__init__(self)
        self.mesh, self.n_features = anchors.mesh, len(feature_anchor)
        firsts = torch.tensor(anchors.bounds[1:-1], dtype=feature_anchor.dtype, device=feature_anchor.device)
        owner = torch.bucketize(feature_anchor, firsts, right=True)
        order = owner.argsort(stable=True)
        self.sizes = owner.bincount(minlength=len(anchors.sizes)).tolist()
        rank = anchors.mesh.get_local_rank()
        first = list(accumulate(self.sizes, initial=0))[rank]
        columns = order[first : first + self.sizes[rank]]
        # one tensor for good: S4 looks at the values of a tensor that it has not seen, which waits for the device
        self.register_buffer("feature_anchor", feature_anchor[columns] - anchors.own.start, persistent=False)
        self.run = _run(columns)
        self.register_buffer("columns", columns.clone() if self.run is None else None, persistent=False)
        ascending = _run(order) is not None
        self.register_buffer("places", None if ascending else order.argsort(), persistent=False)


def _run(columns: Tensor) -> slice | None:
    if not len(columns):
        return slice(0, 0)
    first = int(columns[0])
    run = torch.arange(first, first + len(columns), device=columns.device)
    return slice(first, first + len(columns)) if torch.equal(columns, run) else None
