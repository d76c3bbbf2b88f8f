"""Claim: every bucket is in one run, meets the keys of its neighbours, and as few runs are made as the sizes allow."""

import pytest

from lightning_amp.techniques.hic.attention.bucket_runs import Band, RunSizes
from tests.each import each

W = 5


@pytest.mark.parametrize(
    ("n", "before", "after"), [(60, 0, 0), (58, 0, 0), (60, 5, 5), (35, 10, 3), (2, 5, 0), (60, 10, 10), (0, 5, 5)]
)
@each(together=(1, 2, 3, 100), padded=(False, True))
def test_runs_take_every_bucket_once_and_meet_its_neighbours(
    n: int, before: int, after: int, together: int, padded: bool
) -> None:
    band = Band(n, before + n + after, W, before, RunSizes(together, W, padded=padded))
    buckets = -(-n // W)
    taken = [run.own[0] // W + i for run in band.runs for i in range(run.n_buckets)]
    assert taken == list(range(buckets))
    assert all(run.place == (before + run.own[0]) // W for run in band.runs)
    assert max((run.n_buckets for run in band.runs), default=1) == band.largest <= together
    for run in band.runs:
        begin, end = (run.place - 1) * W, (run.place + run.n_buckets + 1) * W
        first, last = run.near[0], run.near[0] + (run.n_buckets - 1) * W + run.near[1]
        if run.n_buckets > 1:
            assert (first, last, run.near[1], run.missing) == (begin, end, 3 * W, 0)
            assert run.outside == (begin < 0, end > band.n_key_buckets * W)
            assert padded or not any(run.outside)
            continue
        assert (first, last) == (max(begin, 0), min(end, band.keys)), "a single bucket meets the keys that exist"
        assert last + run.missing == min(end, band.n_key_buckets * W), "and the rows that fill the last one"
    if padded:
        assert len(band.runs) == -(-buckets // together), "no more runs than need be"
    assert band.around == (any(run.outside[0] for run in band.runs), any(run.outside[1] for run in band.runs))


def test_scores_are_those_of_rows_and_keys() -> None:
    # 2 + 3 + 2.4 + 1.4 buckets of keys, and one column for the rows that fill the last bucket
    band = Band(17, 17, W, 0, RunSizes(1, W, padded=False))
    assert [run.n_scores for run in band.runs] == [5 * 10, 5 * 15, 5 * 13, 2 * 8]
    band = Band(17, 17, W, 0, RunSizes(4, W, padded=True))
    assert [run.n_scores for run in band.runs] == [4 * 5 * 15]
