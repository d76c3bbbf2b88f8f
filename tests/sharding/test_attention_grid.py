"""A grid of heads and rings: which one an attention takes, and what its ranks send."""

from itertools import pairwise

import pytest
import torch

from lightning_amp.sharding.attention.grid import grid_attention, heads_over
from lightning_amp.sharding.splits import MeshAxis, Sent
from tests.each import each


def positions(n: int, ranks: int) -> tuple[range, ...]:
    return tuple(range(*ends) for ends in pairwise(n * rank // ranks for rank in range(ranks + 1)))


def chosen(heads: int, ranks: int, *, keys: int | None = None, rows: int = 64, causal: bool = False) -> int:
    shapes = tuple(torch.Size((1, n, rows, 16)) for n in (heads, keys or heads, keys or heads))
    at = positions(rows, ranks)
    return heads_over(shapes, torch.float32, at, at, causal)


def test_each_attention_takes_the_fastest_way() -> None:
    # heads send least where each rank has as many
    assert chosen(8, 8) == chosen(16, 8) == 8
    # fewer heads than ranks: over as many ranks as there are, and around rings of the others
    assert chosen(4, 8) == 4
    assert chosen(2, 8) == 2
    assert chosen(1, 8) == 1
    assert chosen(4, 6) == 3
    # of three heads on four ranks, a rank of two computes two: worth it where little is computed
    assert chosen(3, 4) == 2
    assert chosen(3, 4, rows=2**20) == 1
    # the last rank of a ring computes more than others under a causal mask, two of five heads of all rows are less
    assert chosen(5, 4, rows=2**20) == 1
    assert chosen(5, 4, rows=2**20, causal=True) == 4
    # one head of keys would be repeated for other ranks, and is not in a ring
    assert chosen(32, 4, keys=1) == 1
    assert chosen(32, 4, keys=8) == 4
    assert chosen(32, 8, keys=4) == 4


@each(over=(1, 2, 4), ranks=(4, 8), keys=(4, 1))
def test_a_rank_sends_what_the_choice_counts(over: int, ranks: int, keys: int) -> None:
    sent = list[Sent]()
    axis, rows = MeshAxis("a", ranks, 0, None, sent=sent), positions(24 * ranks, ranks)
    q, k, v = (torch.randn(2, n, 24, 8, requires_grad=True) for n in (4, keys, keys))
    out = grid_attention(q, k, v, over=over, axis=axis, rows=rows, columns=rows, scale=0.5)
    assert out.shape == q.shape
    out.sum().backward()
    shard = q.numel() * 4
    repeated = shard if over > 1 else k.numel() * 4
    heads = 2 * (2 * shard + 2 * repeated) * (over - 1) / over
    ring = (3 * ranks // over - 2) * 2 * repeated if over < ranks else 0
    assert sum(one.n_bytes for one in sent) == pytest.approx(heads + ring)
    assert {one.kind for one in sent} == ({"all_to_all"} if over > 1 else set()) | ({"ring"} if over < ranks else set())
