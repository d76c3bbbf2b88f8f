"""Count the floating point operations, memory traffic and kernels of each part of a stratum, forward and backward.

Matrix products, where a multiplication and an addition are two operations; the backward pass has twice as many, for the
gradients of both factors:

    linear       2 n D (D + D + 2 D)        qk, value, feed-forward: 8 n D d under S5
    attention    2 units of 2 pairs a       scores, values; backward 4 units, 5 where scores are recomputed: under
                                            S3, sdpa, fused without kept weights, and in full attention
    decode       2 B N D                    2 B F_k D with S4
    convolution  4 n D                      two taps per channel

Memory traffic is the elements that every operator reads and writes. They were counted for each operator of the
reference decoder, and tests count them again. Tensors smaller than the named ones are left out. S3 copies slices of
attention, and its backward pass adds gradients of all rows for every chunk. The likelihood with several experimental
batches copies rows of the tables. Chunks of fused attention and of the sparse likelihood stay in the cache: their
traffic is the one that would take the measured time, for the likelihood with 2 % nonzero counts.

Known limits: the additions of S5 and nodes are accurate to a few per cent, for eager attention; a Bernoulli likelihood
counts as ZINB. Legend: planning/sizes.py.
"""

from functools import lru_cache, partial
from typing import NamedTuple

from lightning_amp.planning.sizes import RankSizes, Term
from lightning_amp.techniques.hic.attention.bucket_runs import Band, KernelCalls, turned_at_once


class PassCosts(NamedTuple):
    """Costs of one direction (forward or backward) of one part."""

    flops: float = 0.0
    numbers: float = 0.0
    kernels: float = 0.0


Part = tuple[PassCosts, PassCosts]
NOTHING: Part = (PassCosts(), PassCosts())


def parts(s: RankSizes) -> dict[str, Part]:
    """Return the passes of every part by name; the backward pass excludes what `recompute` runs again."""
    found = {name: term.count(s) for name, term in PARTS.items()}
    return {name: part for name, part in found.items() if part is not NOTHING}


def there_and_back(part: Part, *, forwards: int = 1) -> PassCosts:
    """Return the costs of `forwards` forward passes and one backward pass; recompute has two forward passes."""
    return PassCosts(*(forwards * there + back for there, back in zip(*part, strict=True)))


def spine(s: RankSizes) -> Part:
    """Costs of passing over a stratum in a chained decoder: a norm and a projection."""
    if not (s.attends and s.decoder.chained):
        return NOTHING
    rows, square = s.latents, s.decoder.dim * s.width
    flops = 2.0 * s.anchors * square
    return PassCosts(flops, 4 * rows + square, 2), PassCosts(2 * flops, 7 * rows + 2 * square, 3)


def _spine_again(s: RankSizes) -> Part:
    """Costs of rerunning the spine under stream: it runs before the branches, and again from the kept strata."""
    if not s.streamed:
        return NOTHING
    forward, _ = spine(s)
    return PassCosts(*(2 * n for n in forward)), PassCosts()


def _linear(s: RankSizes) -> Part:
    if not s.attends:
        return NOTHING
    rows, square = s.latents, s.decoder.dim * s.width
    flops = 8.0 * s.anchors * square
    forward, backward = (17, 36) if s.paper else (22, 42)
    return (
        PassCosts(flops, forward * rows + 4 * square, 7 if s.paper else 9),
        PassCosts(2 * flops, backward * rows + 8 * square, 13 if s.paper else 15),
    )


def _attention(s: RankSizes) -> Part:
    if not s.attends:
        return NOTHING
    unit = 2.0 * s.pairs * s.attended
    if s.decoder.full:
        # a kernel reads three tensors and writes one; each block of the ring merges its result with the previous ones
        rows, blocks, merged = s.latents, s.ranks if s.by_nodes else 1, s.by_nodes
        return (
            PassCosts(2 * unit, (4 + 8 * merged) * rows * blocks, 1 + 12 * merged * blocks),
            PassCosts(5 * unit, (8 + 9 * merged) * rows * blocks, 1 + 6 * merged * blocks),
        )
    if s.axes.attention == "fused":
        return _fused(s, unit)
    if s.in_kernels:
        return _in_kernels(s, unit)
    rows, bucketed = s.anchors * s.attended, s.padded * s.attended
    chunks, window, near = s.chunks, s.decoder.window, s.decoder.window * s.attended
    if s.axes.attention == "eager":
        return (
            PassCosts(2 * unit, 8 * rows + 51 * bucketed + 25.5 * near + 8 * s.pairs + 3 * window**2, 49),
            PassCosts(4 * unit, 30 * rows + 78 * bucketed + 16 * near + 11 * s.pairs + window**2, 49),
        )
    masked = 16 * near + 3 * window**2
    forward = 8 * rows + 53 * bucketed + 9.5 * near + 8 * s.pairs + chunks * masked
    backward = 30 * rows + 78 * bucketed + 11 * s.pairs + chunks * (12 * (bucketed + near) + window**2)
    kept = PassCosts(4 * unit, backward, 16 + 33 * chunks)
    if s.axes.attention == "chunked":
        again = 44 * bucketed + 7 * s.pairs + chunks * masked
        kept = PassCosts(5 * unit, backward + again, 16 + 63 * chunks)
    return PassCosts(2 * unit, forward, 19 + 31 * chunks), kept


def _fused(s: RankSizes, unit: float) -> Part:
    rows, again = s.anchors * s.attended, not s.keeps_weights
    # the inner buckets under nodes; `_halo` counts the outer ones
    there, back = _fused_kernels(s.bands[0], again, s.attended, s.launched)
    # on an accelerator the scores of a run do not stay in a cache
    passed = s.launched * s.pairs
    return (
        PassCosts(2 * unit, 21 * rows + 4 * passed, there),
        PassCosts((4 + again) * unit, 54 * rows + (7 + 3 * again) * passed, back),
    )


@lru_cache(maxsize=256)
def _fused_kernels(band: Band, again: bool, dim: int, launched: bool) -> tuple[int, int]:
    """Count operators of the forward and backward pass; `again`: scores are recomputed instead of kept."""
    turns = partial(_turns, band.window, dim, launched)
    around = sum(band.around)
    places, most = band.n_key_buckets + around, band.largest + around
    slabs = [min(most, places - first) for first in range(0, places, most)]
    of_slabs = sum(map(turns, slabs))
    # keys: pad, pair channels, compute norms, clamp, divide; rotate
    there = 4 + (around > 0 or band.keys % band.window > 0) + of_slabs
    # gradients of keys: zero-fill; five operators per slab, the last of which adds to the gradients of queries
    at_once, in_place = band.at_once, len(band.runs) == 1
    back = there + (5 + turns(band.n_key_buckets) if at_once else 2 + 5 * len(slabs) + of_slabs)
    for run in band.runs:
        rows, keys = band.copies(run)
        chunks, met = -(-run.own[1] // band.sizes.rows), 1 if run.n_buckets == 1 else 3
        missing, turned = run.missing > 0, turns(run.n_buckets)
        masks = 1 + any(run.outside) + missing
        # queries: pad, pair and rotate, forward and backward; computed at once, they are the keys' rotated rows
        own = 0 if at_once else 1 + rows
        there += own + turned + (not in_place) + keys + chunks * (3 + masks)
        back += own + (not at_once) + 2 * turned + rows + keys
        # the backward pass of a softmax is one operator on a CPU, and three on an accelerator
        back += chunks * (again * (2 + masks) + 4 + 2 * launched + 2 * met + missing)
    return there, back


def _in_kernels(s: RankSizes, unit: float) -> Part:
    """Costs of attention in torch's kernels, for the inner buckets under nodes; the backward pass recomputes scores."""
    run, size = s.kernel_calls[0], s.decoder.window * s.attended
    rows, keys, slots = run.rows * size, run.keys * size, run.slots * size
    turns = _turns(s.decoder.window, s.attended, s.launched, run.rows + run.keys)
    there, back = _kernel_calls(run, ragged=s.ragged, alike=not s.by_nodes, turns=turns)
    return (
        PassCosts(2 * unit, 10 * rows + 8 * keys, there),
        PassCosts(5 * unit, 11 * rows + 17 * keys + 8 * slots, back),
    )


def _kernel_calls(run: KernelCalls, *, ragged: bool, alike: bool, turns: int) -> tuple[int, int]:
    """Count operators forward and backward; `ragged`: the last bucket is padded; `alike`: keys are the rows."""
    calls = len(run.calls)
    # pair channels, divide by norms; pad values; rotate and reorder rows
    there = 2 * ragged + (1 if alike else 2) + 3 + turns + calls + (calls > 1)
    # pad the gradient; add up gradients of slots; gradients of keys, and of paired channels
    return there, ragged + calls + 3 + 5 - alike + turns + 1


def _turns(window: int, dim: int, launched: bool, buckets: int) -> int:
    """Count the products that rotate `buckets` buckets."""
    return 1 if turned_at_once(buckets * window, dim=dim, launched=launched) else 2


def _convolution(s: RankSizes) -> Part:
    if s.attends or not s.keyed:
        return NOTHING
    rows = s.latents
    return PassCosts(4 * rows, 6 * rows, 3), PassCosts(8 * rows, 13 * rows, 5)


def _decode(s: RankSizes) -> Part:
    rows, scores, blocks = s.latents, s.cells * s.mean_decoded, s.blocks
    # every block but the first adds its gradient of the key to the previous sum
    adding = (blocks - 1) * 3 * rows
    if s.axes.decode == "key-first":
        chosen = s.mean_decoded * s.width
        flops = 2.0 * s.cells * chosen
        forward, backward = scores + 3 * blocks * chosen, 2 * scores + blocks * (3 * chosen + rows)
    else:
        every = s.cells * s.anchors
        flops = 2.0 * every * s.width
        forward, backward = scores + 2 * every + blocks * rows, 2 * scores + 5 * every + 2 * blocks * rows
    return PassCosts(flops, forward, 3 * blocks), PassCosts(2 * flops, backward + adding, 4 * blocks)


def _likelihood(s: RankSizes) -> Part:
    blocks, table = s.blocks, s.decoder.n_batches * s.mean_features
    single = s.decoder.n_batches == 1
    if s.axes.likelihood == "sparse":
        forward, backward = (43, 13) if single else (76, 27)
        chunks = -(-s.mean_features // s.sparse_columns)
        return (
            PassCosts(
                0, forward * s.batch_scores, ((24 if single else 28) + (22 + (chunks > 1) * 2) * chunks) * blocks
            ),
            PassCosts(0, backward * s.batch_scores, (8 if single else 14) * blocks),
        )
    if single:
        return (
            PassCosts(0, 55.5 * s.batch_scores + 21 * blocks * table, 33 * blocks),
            PassCosts(0, 75.5 * s.batch_scores + 43 * blocks * table, 51 * blocks),
        )
    return (
        PassCosts(0, 80.5 * s.batch_scores + 4 * blocks * table, 37 * blocks),
        PassCosts(0, 110.5 * s.batch_scores + 12 * blocks * table, 51 * blocks),
    )


def _channels(s: RankSizes) -> Part:
    """Costs that S5 adds: statistics of norms and keys, products of all output channels, copies of scores to sum."""
    if not (s.attends and s.hidden):
        return NOTHING
    rows, whole, square = s.latents, s.anchors * s.decoder.dim, s.decoder.dim * s.width
    scores = 0 if s.gathered else 4 * s.pairs
    return (
        PassCosts(0, 24 * rows + 8 * whole + 100 * s.anchors + 32 * square + scores, 71 + 4 * s.ranks),
        PassCosts(0, 30 * rows + 28 * whole + 160 * s.anchors + 104 * square + scores, 71 + 14 * s.ranks),
    )


def _halo(s: RankSizes) -> Part:
    """Costs that nodes adds, per neighbour: rows to exchange, and attention of three more buckets."""
    if not (s.attends and s.by_nodes) or s.decoder.full:
        return NOTHING
    rows, near = s.anchors * s.decoder.dim, s.neighbours * s.decoder.window * s.decoder.dim
    back = (4 + 15 * s.neighbours) * rows
    return (
        PassCosts(0, 3 * rows + 109 * near, 12 + 52 * s.neighbours),
        PassCosts(0, back + 195 * near, 20 + 64 * s.neighbours),
    )


PARTS: dict[str, Term[RankSizes, Part]] = {
    "convolution": Term(_convolution, "placement", of_features=False),
    "decode": Term(_decode, "placement", "features", "decode", "activations"),
    "likelihood": Term(_likelihood, "placement", "features", "likelihood", "activations"),
    # sums of the stratum's gradients of u, v and its weight; under stream its own gradients are kept
    "sums": Term(
        lambda s: (PassCosts(), PassCosts(0, 3 * (s.anchors + s.cells) * s.width, 4 + s.streamed)),
        "placement",
        "activations",
        of_features=False,
    ),
    "linear": Term(_linear, "placement", of_features=False),
    "attention": Term(_attention, "placement", "attention", "activations", of_features=False),
    "channels": Term(_channels, "placement", "attention", of_features=False),
    "halo": Term(_halo, "placement", of_features=False),
    "spine": Term(_spine_again, "placement", "activations", of_features=False),
}
"""Parts of a stratum, in the order in which their times are summed."""
