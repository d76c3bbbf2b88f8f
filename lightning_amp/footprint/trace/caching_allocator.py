"""Reserve memory as torch's CUDA allocator does, without a GPU: sizes are rounded, blocks are split and merged.

The rules are those of torch's CUDACachingAllocator (c10/cuda/CUDACachingAllocator.cpp) on one stream:

- A size is a multiple of 512 bytes. Up to 1 MiB it is taken from the small pool, else from the large one.
- The smallest free block that suffices is taken, at the lowest address. What it has in excess is split off: any
  512 bytes in the small pool and in expandable segments, else more than 1 MiB.
- A released block is merged with free neighbours, and stays reserved.
- Without a free block, a segment is reserved: 2 MiB for small sizes, 20 MiB below 10 MiB, else a multiple of 2 MiB.
- An expandable segment is a range of addresses that is backed by pages of 2 MiB (small) or 20 MiB (large) as they are
  needed, at the lowest address with room. A free block before addresses without pages counts as large as both.
- With `max_split_size_mb` blocks of that size are not split, and serve only requests of at least this size, of which
  they exceed by less than 20 MiB.
- If the device is full, large unsplit blocks are given back (`max_split_size_mb`), then all free segments and pages.

Known limits: one stream, and no private pools of CUDA graphs.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_amp.footprint.trace.allocator_settings import MIB, SMALLEST, AllocatorSettings, rounded

SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE_SEGMENT, LEAST_OWN_SEGMENT, ROUND_LARGE = 20 * MIB, 10 * MIB, 2 * MIB
ADDRESSES = 20 * 2**40
"""Addresses between the beginnings of two segments, which may grow; a multiple of a page."""


class DeviceFullError(Exception):
    """No block can be allocated, although all free segments were given back."""


@dataclass(eq=False, slots=True)
class Block:
    """A range of addresses of a segment, with its neighbours in it; `mapped` is whether pages back it."""

    address: int
    size: int
    small: bool
    free: bool = False
    mapped: bool = True
    before: "Block | None" = None
    after: "Block | None" = None


Free = list[tuple[int, int, Block]]
OnSegment = Callable[[str, int, int], None]


class CachingAllocator:
    """The allocator of one device and one stream.

    Attributes:
        reserved, allocated: Bytes now.
        peak_reserved, peak_allocated: Most bytes so far.
        given_back: How often free segments were given back because the device was full.

    Args:
        settings: Settings of the allocator; None for those that AMPStrategy sets.
        capacity: Bytes that may be reserved; None for no limit.
        on_segment: Called with what happens to reserved memory, as torch's snapshots name it (`segment_alloc`,
            `segment_free`, `segment_map` or `segment_unmap`), its address and its size.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        capacity: int | None = None,
        on_segment: OnSegment = lambda action, address, size: None,
    ) -> None:
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = self.given_back = 0
        self._settings, self._capacity, self._on_segment = settings or AllocatorSettings(), capacity, on_segment
        # the first block of each segment, by address
        self._segments: dict[int, Block] = {}
        self._n_segments = 0
        # blocks of the large and of the small pool: free ones by size and address, those without pages by address
        self._free: tuple[Free, Free] = ([], [])
        self._unmapped: tuple[Free, Free] = ([], [])

    def allocate(self, n_bytes: int) -> Block:
        """Return a block of at least `n_bytes` bytes.

        Raises:
            DeviceFullError: The device is full.
        """
        size = self._settings.size_of(n_bytes)
        small = size <= SMALL
        block = self._found(size, small) or self._taken(size, small)
        if block is None and self._give_unsplit_back(size, small):
            block = self._taken(size, small)
        if block is None:
            self.given_back += 1
            self.give_back()
            block = self._taken(size, small)
        if block is None:
            raise DeviceFullError(f"{size} more than {self.reserved} of {self._capacity} bytes")
        block.free = False
        excess, most = block.size - size, self._settings.max_split_bytes
        splits = excess > SMALL and (most is None or size < most)
        if excess >= SMALLEST if small or self._settings.expandable else splits:
            self._keep(self._split(block, size))
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Free a block; it is merged with free neighbours, and stays reserved."""
        self.allocated -= block.size
        self._merge(block)

    def give_back(self) -> None:
        """Give free segments and pages back to the device, as `torch.cuda.empty_cache` does."""
        for free in self._free:
            for *_, block in list(free):
                if self._settings.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._end(block)

    def segments(self) -> Iterator[list[Block]]:
        """Yield the blocks of each range of addresses that pages back without a gap."""
        for address in sorted(self._segments):
            block: Block | None = self._segments[address]
            found: list[Block] = []
            while block is not None:
                if block.mapped:
                    found.append(block)
                elif found:
                    yield found
                    found = []
                block = block.after
            if found:
                yield found

    def _found(self, size: int, small: bool) -> Block | None:
        """Take a free block."""
        free, most = self._free[small], self._settings.max_split_bytes
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        if self._settings.expandable:
            while place + 1 < len(free) and _room(free[place + 1][2]) < _room(free[place][2]):
                place += 1
        block = free[place][2]
        if most is not None and (block.size >= most if size < most else block.size >= size + LARGE_SEGMENT):
            return None
        del free[place]
        return block

    def _taken(self, size: int, small: bool) -> Block | None:
        """Return a block in memory that is reserved now; None if the device is full."""
        if self._settings.expandable:
            return self._grown(size, small)
        unit = ROUND_LARGE if size >= LEAST_OWN_SEGMENT else LARGE_SEGMENT
        taken = SMALL_SEGMENT if small else rounded(size, unit)
        if not self._reserve(taken):
            return None
        block = self._begun(taken, small)
        self._on_segment("segment_alloc", block.address, taken)
        return block

    def _grown(self, size: int, small: bool) -> Block | None:
        """Return a block of expandable segments, at the lowest address that has room for it."""
        for *_, start in self._unmapped[small]:
            block = start.before if start.before is not None and start.before.free else start
            room, one = 0, block
            while one is not None and one.free and room < size:
                room += one.size
                one = one.after  # type: ignore[assignment]
            if room >= size:
                break
        else:
            block = self._begun(ADDRESSES, small)
            block.free, block.mapped = True, False
            self._keep(block)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            assert block.after is not None, "there is room"
            mapped = self._map(block.after, min(block.after.size, size - block.size))
            if mapped is None:
                return None
            block = mapped
        self._drop(block)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Back the beginning of a range with pages; return the free block that it is part of."""
        taken = rounded(size, SMALL_SEGMENT if block.small else LARGE_SEGMENT)
        if not self._reserve(taken):
            return None
        self._drop(block)
        if block.size > taken:
            self._keep(self._split(block, taken))
        block.mapped = True
        self._on_segment("segment_map", block.address, taken)
        return self._merge(block)

    def _unmap(self, block: Block) -> None:
        """Take whole pages from a free block."""
        unit = SMALL_SEGMENT if block.small else LARGE_SEGMENT
        first, end = rounded(block.address, unit), (block.address + block.size) // unit * unit
        if end <= first:
            return
        self._drop(block)
        if end < block.address + block.size:
            self._keep(self._split(block, end - block.address))
        if first > block.address:
            rest = self._split(block, first - block.address)
            self._keep(block)
            block = rest
        block.mapped = False
        self.reserved -= block.size
        self._on_segment("segment_unmap", block.address, block.size)
        block = self._merge(block)
        if block.before is None and block.after is None:
            self._drop(block)
            del self._segments[block.address]

    def _give_unsplit_back(self, size: int, small: bool) -> bool:
        """Give the smallest unsplit block back that suffices, else the largest ones; return whether that suffices."""
        most = self._settings.max_split_bytes
        if most is None or self._settings.expandable:
            return False
        wanted, found = max(size, most), 0
        free = self._free[small]
        place = bisect_left(free, (wanted, -1))
        if place < len(free):
            self._end(free[place][2])
            return True
        while free and found < wanted and free[-1][0] >= most:
            found += free[-1][0]
            self._end(free[-1][2])
        return found >= wanted

    def _begun(self, size: int, small: bool) -> Block:
        """Return the only block of a new segment."""
        self._n_segments += 1
        block = Block(ADDRESSES * self._n_segments, size, small)
        self._segments[block.address] = block
        return block

    def _end(self, block: Block) -> None:
        """Give a segment back that is one free block."""
        self._drop(block)
        del self._segments[block.address]
        self.reserved -= block.size
        self._on_segment("segment_free", block.address, block.size)

    def _split(self, block: Block, size: int) -> Block:
        """Make a block as small as `size`; return the rest."""
        rest = Block(block.address + size, block.size - size, block.small, True, block.mapped, block, block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        return rest

    def _merge(self, block: Block) -> Block:
        """Merge a block with free neighbours, and keep the result."""
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free or neighbour.mapped != block.mapped:
                continue
            self._drop(neighbour)
            first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        self._keep(block)
        return block

    def _keep(self, block: Block) -> None:
        block.free = True
        insort(*self._place_of(block))

    def _drop(self, block: Block) -> None:
        listed, key = self._place_of(block)
        del listed[bisect_left(listed, key[:2])]

    def _place_of(self, block: Block) -> tuple[Free, tuple[int, int, Block]]:
        if block.mapped:
            return self._free[block.small], (block.size, block.address, block)
        return self._unmapped[block.small], (block.address, 0, block)

    def _reserve(self, n_bytes: int) -> bool:
        if self._capacity is not None and self.reserved + n_bytes > self._capacity:
            return False
        self.reserved += n_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True


def _room(block: Block) -> int:
    """Return the size that a free block can have, with the addresses after it that no pages back."""
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)
