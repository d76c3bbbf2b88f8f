"""Claim: the allocator reserves by the rules of torch's CUDACachingAllocator, in cases worked out by hand and in random
sequences.
"""

import random
from itertools import pairwise
from typing import Any

import pytest

from lightning_amp.errors import PlanError
from lightning_amp.footprint.trace.allocator_settings import AllocatorSettings
from lightning_amp.footprint.trace.caching_allocator import Block, CachingAllocator, DeviceFullError
from tests.each import each

MIB = 2**20
FIXED, GROWING = AllocatorSettings(expandable=False), AllocatorSettings()
UNSPLIT = AllocatorSettings(expandable=False, max_split_bytes=64 * MIB)
ROUNDED = AllocatorSettings(expandable=False, divisions=4)


class Recorded(CachingAllocator):
    """An allocator, and what happened to its segments, in MiB."""

    def __init__(self, settings: AllocatorSettings = FIXED, **options: Any) -> None:
        self.said: list[tuple[str, int]] = []
        super().__init__(settings, on_segment=lambda what, _, size: self.said.append((what, size // MIB)), **options)


@pytest.mark.parametrize(
    ("n_bytes", "fixed", "growing"),
    [
        (1, 2 * MIB, 2 * MIB),
        (MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, 20 * MIB, 20 * MIB),
        (9 * MIB, 20 * MIB, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 20 * MIB),
        (13 * MIB - 5, 14 * MIB, 20 * MIB),
        (41 * MIB, 42 * MIB, 60 * MIB),
    ],
)
def test_what_is_reserved_for_one_tensor(n_bytes: int, fixed: int, growing: int) -> None:
    for settings, reserved in ((FIXED, fixed), (GROWING, growing)):
        allocator = CachingAllocator(settings)
        block = allocator.allocate(n_bytes)
        assert allocator.allocated == block.size
        assert block.size >= n_bytes
        assert allocator.reserved == reserved
        allocator.release(block)
        assert (allocator.allocated, allocator.reserved) == (0, reserved)
        allocator.allocate(n_bytes)
        assert allocator.reserved == reserved
        assert allocator.given_back == 0


def test_neighbours_merge_and_the_smallest_free_block_is_taken() -> None:
    allocator = CachingAllocator(FIXED)
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert allocator.reserved == 20 * MIB
    allocator.release(blocks[1])
    allocator.release(blocks[3])
    assert allocator.allocate(4 * MIB).address == blocks[1].address
    allocator.release(blocks[2])
    # 8 MiB in one piece: the third and the fourth block
    assert allocator.allocate(8 * MIB).address == blocks[2].address
    assert allocator.reserved == 20 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 40 * MIB


def test_what_is_split_off() -> None:
    allocator = CachingAllocator(FIXED)
    allocator.release(allocator.allocate(30 * MIB))
    # 1 MiB is not split off, a little more is
    whole = allocator.allocate(29 * MIB)
    assert whole.size == 30 * MIB
    allocator.release(whole)
    part = allocator.allocate(29 * MIB - 512)
    assert part.size == 29 * MIB - 512
    # in the small pool, and in segments that grow, 512 bytes are
    for settings, n_bytes in ((FIXED, 2 * MIB - 512), (GROWING, 20 * MIB - 512)):
        allocator = CachingAllocator(settings)
        allocator.release(allocator.allocate(min(n_bytes, MIB)))
        allocator.allocate(512 if n_bytes < 2 * MIB else n_bytes)
        assert allocator.allocated == (512 if n_bytes < 2 * MIB else n_bytes)


def test_a_segment_that_grows_uses_its_free_end() -> None:
    allocator = Recorded(GROWING)
    first = allocator.allocate(16 * MIB)
    # 4 MiB are free at the end: 20 more make 24
    second = allocator.allocate(24 * MIB)
    assert second.address == first.address + first.size
    assert allocator.reserved == 40 * MIB
    assert allocator.said == [("segment_map", 20), ("segment_map", 20)]
    assert len(list(allocator.segments())) == 1


def test_the_end_of_a_segment_that_grows_is_taken_last() -> None:
    allocator = CachingAllocator(GROWING)
    first = allocator.allocate(14 * MIB)
    allocator.allocate(13 * MIB)
    allocator.release(first)
    # 13 MiB are free at the end, and 14 before: the end could grow, so it counts as larger
    assert allocator.allocate(12 * MIB).address == first.address


def test_a_segment_of_fixed_size_leaves_a_sliver_for_each_larger_batch() -> None:
    # the case for which segments that grow were made (torch's note "Expandable Segments")
    reserved = {}
    for settings in (FIXED, GROWING):
        allocator = CachingAllocator(settings)
        for rows in (30, 31, 32, 33, 34):
            blocks = [allocator.allocate(rows * MIB) for _ in range(4)]
            for block in blocks:
                allocator.release(block)
        reserved[settings] = allocator.reserved
    # each odd size fits in what is reserved for the even one before: 30, 32 and 34 rows, 4 of each
    assert reserved == {FIXED: 4 * (30 + 32 + 34) * MIB, GROWING: 140 * MIB}


def test_a_full_device_gets_free_segments_back_and_is_tried_again() -> None:
    allocator = Recorded(capacity=60 * MIB)
    allocator.release(allocator.allocate(30 * MIB))
    kept = allocator.allocate(25 * MIB)
    assert (kept.size, allocator.reserved) == (25 * MIB, 30 * MIB)
    free = allocator.allocate(20 * MIB)
    allocator.release(free)
    # 30 (25 of them used) and 20 are reserved: 20 go back
    allocator.allocate(26 * MIB)
    assert allocator.reserved == 56 * MIB
    assert allocator.given_back == 1
    assert allocator.said[-2:] == [("segment_free", 20), ("segment_alloc", 26)]
    with pytest.raises(DeviceFullError):
        allocator.allocate(20 * MIB)
    assert allocator.peak_reserved == 56 * MIB


def test_pages_of_a_segment_that_grows_go_back_and_its_gap_is_filled_first() -> None:
    allocator = Recorded(GROWING, capacity=160 * MIB)
    first, middle, _ = (allocator.allocate(size * MIB) for size in (30, 60, 30))
    assert allocator.said == [("segment_map", 40), ("segment_map", 60), ("segment_map", 20)]
    allocator.release(middle)
    # of the free addresses from 30 to 90, the pages from 40 to 80 go back
    allocator.give_back()
    assert allocator.reserved == 80 * MIB
    again = allocator.allocate(55 * MIB)
    assert again.address == first.address + 30 * MIB
    assert allocator.said[3:] == [("segment_unmap", 40), ("segment_map", 40)]
    # 64 MiB do not fit there, and 80 more than 120 not on the device
    allocator.release(again)
    allocator.allocate(64 * MIB)
    assert allocator.said[5:] == [("segment_unmap", 40), ("segment_map", 80)]
    assert (allocator.given_back, allocator.reserved, allocator.peak_reserved) == (1, 160 * MIB, 160 * MIB)


def test_blocks_of_the_largest_size_are_not_split() -> None:
    allocator = Recorded(UNSPLIT, capacity=200 * MIB)
    large = allocator.allocate(80 * MIB)
    allocator.release(large)
    # no smaller request takes it, nor a larger one of which it exceeds by 20 MiB
    small = allocator.allocate(40 * MIB)
    assert (allocator.allocate(64 * MIB).size, allocator.reserved) == (80 * MIB, 120 * MIB)
    allocator.release(large)
    allocator.release(small)
    # full: the large block does not suffice for 130 MiB, and all that is free goes back
    larger = allocator.allocate(130 * MIB)
    assert allocator.said[2:] == [("segment_free", 80), ("segment_free", 40), ("segment_alloc", 130)]
    assert allocator.given_back == 1
    allocator.allocate(40 * MIB)
    allocator.release(larger)
    # full: one large block suffices, and nothing else goes back
    allocator.allocate(64 * MIB)
    assert allocator.said[5:] == [("segment_alloc", 40), ("segment_free", 130), ("segment_alloc", 64)]
    assert (allocator.reserved, allocator.given_back) == (104 * MIB, 1)


def test_several_large_blocks_go_back_the_largest_first() -> None:
    allocator = Recorded(UNSPLIT, capacity=300 * MIB)
    for block in [allocator.allocate(size * MIB) for size in (40, 70, 80, 90)]:
        allocator.release(block)
    allocator.allocate(150 * MIB)
    assert allocator.said[4:] == [("segment_free", 90), ("segment_free", 80), ("segment_alloc", 150)]
    assert (allocator.reserved, allocator.given_back) == (260 * MIB, 0)


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [(1, 512), (2048, 2048), (2049, 2560), (1200 * 2**10, 1280 * 2**10), (MIB, MIB), (5 * MIB + 1, 6 * MIB)],
)
def test_sizes_are_rounded_to_parts_of_powers_of_two(n_bytes: int, expected: int) -> None:
    assert ROUNDED.size_of(n_bytes) == expected


def test_settings_are_read_from_the_environments_text() -> None:
    assert AllocatorSettings.parse("") == FIXED
    text = "expandable_segments:True, max_split_size_mb:128,roundup_power2_divisions:8,backend:native"
    assert AllocatorSettings.parse(text) == AllocatorSettings(True, 128 * MIB, 8)
    assert AllocatorSettings.parse("garbage_collection_threshold:0.8") == FIXED
    for text in ("backend:cudaMallocAsync", "roundup_power2_divisions:[256:1,>:4]", "large_segment_size_mb:40"):
        with pytest.raises(PlanError, match="is not modelled; modelled are expandable_segments, max_split_size_mb"):
            AllocatorSettings.parse(text)


@pytest.mark.parametrize("settings", [FIXED, GROWING, UNSPLIT, ROUNDED], ids=["fixed", "growing", "unsplit", "rounded"])
@each(seed=range(40))
def test_random_sequences(settings: AllocatorSettings, seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.choice([None, 400 * MIB])
    now = 0

    def on_segment(what: str, _: int, size: int) -> None:
        nonlocal now
        now += size if what in ("segment_alloc", "segment_map") else -size

    allocator = CachingAllocator(settings, capacity=capacity, on_segment=on_segment)
    held: list[Block] = []
    most = 0
    for _ in range(300):
        if held and draw.random() < 0.5:
            allocator.release(held.pop(draw.randrange(len(held))))
        elif draw.random() < 0.01:
            allocator.give_back()
        else:
            n_bytes = draw.choice([100, 300_000, MIB, 3 * MIB, 11 * MIB, 70 * MIB]) + draw.randrange(100_000)
            try:
                held.append(allocator.allocate(n_bytes))
            except DeviceFullError:
                assert capacity is not None
            else:
                assert held[-1].size >= n_bytes
        most = max(most, allocator.reserved)
        assert allocator.allocated == sum(block.size for block in held) <= allocator.reserved == now
        assert capacity is None or allocator.reserved <= capacity
        # blocks fill their ranges without gaps or overlaps, and no two free ones are neighbours
        found = 0
        for blocks in allocator.segments():
            for one, following in pairwise(blocks):
                assert one.address + one.size == following.address
                assert not (one.free and following.free)
            found += sum(block.size for block in blocks)
        assert found == allocator.reserved
    assert allocator.peak_reserved == most
    for block in held:
        allocator.release(block)
    assert all(len(blocks) == 1 and blocks[0].free for blocks in allocator.segments())
    allocator.give_back()
    assert (allocator.reserved, list(allocator.segments())) == (0, [])
