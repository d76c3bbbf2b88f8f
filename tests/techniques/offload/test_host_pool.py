"""Claim: a buffer of the host pool has memory if and only if it is asked for with values, whatever it was made for."""

import pytest

from lightning_amp.errors import ModelError
from lightning_amp.techniques.host_memory.host_pool import HostPool
from lightning_amp.techniques.host_memory.limit import page_locked


def test_a_buffer_of_fake_tensors_gets_memory_where_it_is_asked_for_with_values() -> None:
    pool = HostPool(limit=None)
    fake = pool.take(100, real=False, pinned=False)
    assert fake.memory is None
    pool.give(fake)
    real = pool.take(80, real=True, pinned=False)
    assert real.memory is not None
    assert (real.n_bytes, real.memory.nbytes, pool.n_bytes) == (100, 100, 100)
    pool.give(real)
    assert pool.take(100, real=True, pinned=False) is real
    pool.give(real)
    assert pool.take(100, real=False, pinned=False).memory is None


def test_memory_for_a_buffer_of_fake_tensors_is_held_to_the_limit() -> None:
    pool = HostPool(limit=100)
    # a count may exceed the limit, which its plan is compared with later
    large = pool.take(150, real=False, pinned=False)
    pool.give(large)
    with pytest.raises(ModelError, match="may have 100 B"):
        pool.take(80, real=True, pinned=False)


def test_page_locked_buffers_have_the_sizes_that_torch_takes() -> None:
    assert [page_locked(n) for n in (0, 1, 2, 3, 2**20, 2**20 + 1)] == [0, 1, 2, 4, 2**20, 2**21]
    pool = HostPool(limit=None)
    taken = pool.take(100, real=False, pinned=True)
    assert (taken.n_bytes, pool.n_bytes) == (128, 128)
    pool.give(taken)
    # what torch has rounded up is used
    assert pool.take(120, real=False, pinned=True) is taken
    assert pool.take(30, real=False, pinned=True).n_bytes == 32
    assert pool.n_bytes == 160
