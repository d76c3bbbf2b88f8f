"""Claim: segments are chosen within their bound wherever there are any, from the fewest bytes to those of no replay."""

import numpy as np

from lightning_amp.techniques.replay.choose_cuts import Stretches, fastest, least


def chain(n: int) -> Stretches:
    """Operators one after the other, each saved and read by the next one alone."""
    random = np.random.default_rng(0)
    made, seconds = random.integers(10, 1000, n), random.uniform(1, 10, n)
    p, q = np.indices((n + 1, n + 1))
    until = np.concatenate([[0], np.cumsum(made)])
    saved = np.where(q > p, until[q] - until[p], 0.0)
    took = np.concatenate([[0], np.cumsum(seconds)])
    return Stretches(
        places=np.arange(n + 1),
        out=np.where(q > p, made[np.maximum(q - 1, 0)], 0.0),
        saved=saved,
        seconds=np.where(q > p, took[q] - took[p], 0.0),
        at_work=saved,
        one_by_one_seconds=saved,
    )


def test_every_bound_that_can_be_met_is_met() -> None:
    stretches = chain(40)
    fewest, took = least(stretches), np.inf
    for bound in np.linspace(1.01 * fewest.n_bytes, stretches.all_saved, 60):
        found = fastest(stretches, bound)
        assert found is not None, bound
        assert fewest.n_bytes <= found.n_bytes <= bound, (bound, found.n_bytes)
        # more room takes less time, but for the parts of a bound in which bytes are counted
        assert found.seconds <= 1.1 * took, (bound, found.seconds, took)
        took = found.seconds
    assert took == 0
