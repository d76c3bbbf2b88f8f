"""Choose how much of a stratum exists at a time: buckets under S3, cells under stream; and how many strata.

The memory model counts with the same numbers.
"""

CHUNK_QUERIES = 128
"""Queries per chunk of local attention; the paper uses 128 at 500 kb and 32 at 100 kb (Section 4)."""


def chunk_buckets(window: int) -> int:
    """Buckets of `window` queries in one chunk: about `CHUNK_QUERIES` queries, one bucket at least."""
    return max(1, CHUNK_QUERIES // window)


BLOCK_SCORES = 2**20
"""Scores [cells, F_k] that exist at a time: 4 MiB of each tensor of the likelihood stay in a CPU's cache."""


LAUNCHED_SCORES = 2**23
"""The same where operators are launched: 32 MiB of each tensor, so that most batches are one block."""


def block_cells(features: int, *, anchors: int, launched: bool = False) -> int:
    """Cells in one block: about `BLOCK_SCORES` scores of the largest stratum, 8 cells at least; `features` are its F_k.

    Without S4 the scores of all anchors are made.

    Args:
        launched: Whether the device has its operators launched, and is no CPU.
    """
    return max(8, (LAUNCHED_SCORES if launched else BLOCK_SCORES) // max(features, anchors))


SPARSE_NUMBERS, SPARSE_LAUNCHED, SPARSE_COLUMNS = 2**16, 2**23, 64
"""Numbers of a chunk of a sparse likelihood, on a CPU and where operators are launched, and the fewest columns
(techniques/hic/scores/sparse_likelihood.py)."""


def sparse_columns(cells: int, *, launched: bool) -> int:
    """Columns of a sparse likelihood that are computed at a time; `launched` as for `block_cells`."""
    return max(SPARSE_COLUMNS, (SPARSE_LAUNCHED if launched else SPARSE_NUMBERS) // max(1, cells))


KEPT_WEIGHTS = 2**24
"""Attention weights [N, 3 w] up to which a streamed stratum keeps them: 64 MiB."""


def keeps_weights(anchors: int, *, window: int) -> bool:
    """Whether fused attention keeps its weights for the backward pass of a streamed stratum."""
    return 3 * anchors * window <= KEPT_WEIGHTS


LATENTS_SIDE_BY_SIDE = 2**24
"""Numbers of a tensor [N, D] of all strata that run side by side: 64 MiB, of a dozen such tensors."""


def strata_side_by_side(threads: int, *, anchors: int, dim: int) -> int:
    """Streamed strata that a CPU runs at the same time."""
    return max(1, min(threads, LATENTS_SIDE_BY_SIDE // (anchors * dim)))
