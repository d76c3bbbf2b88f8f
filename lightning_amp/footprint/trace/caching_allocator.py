"""Reserve memory as torch's CUDA allocator does, without a GPU: sizes are rounded, blocks are split and merged.

The rules are those of torch's CUDACachingAllocator (c10/cuda/CUDACachingAllocator.cpp) on one stream:

- A size is a multiple of 512 bytes. Up to 1 MiB it is taken from the small pool, else from the large one.
- The smallest free block that suffices is taken, at the lowest address. What it has in excess is split off: any
  512 bytes in the small pool and in expandable segments, else more than 1 MiB.
- A released block is merged with free neighbours, and stays reserved.
- Without a free block, a segment is reserved: 2 MiB for small sizes, 20 MiB below 10 MiB, else a multiple of 2 MiB. An
  expandable segment grows at its end instead, by multiples of 2 MiB (small) or 20 MiB (large).

Known limits: a device that is full gives free segments back and tries again, which is not modelled. Workspaces of
cuBLAS and the context of CUDA are not of this allocator's requests.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

SMALLEST, SMALL, SMALL_SEGMENT = 512, 2**20, 2 * 2**20
LARGE_SEGMENT, LEAST_OWN_SEGMENT, ROUND_LARGE = 20 * 2**20, 10 * 2**20, 2 * 2**20
ADDRESSES = 2**40
"""Addresses between the beginnings of two segments, which may grow."""


def rounded(n_bytes: int, unit: int = SMALLEST) -> int:
    """Return the least multiple of `unit` that is at least `n_bytes`, and at least `unit`."""
    return max(unit, -(-n_bytes // unit) * unit)


@dataclass(eq=False, slots=True)
class Block:
    """A range of addresses of a segment, with its neighbours in it."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass(eq=False, slots=True)
class Segment:
    """Memory reserved from the device."""

    first: Block
    size: int

    @property
    def address(self) -> int:
        """Address of its first byte."""
        return self.first.address


class CachingAllocator:
    """The allocator of one device and one stream.

    Attributes:
        segments: What is reserved, in the order of reservation.
        reserved, allocated: Bytes now.
        peak_reserved, peak_allocated: Most bytes so far.

    Args:
        expandable: Whether segments grow, as with `PYTORCH_ALLOC_CONF=expandable_segments:True`.
    """

    def __init__(self, *, expandable: bool = True) -> None:
        self.segments: list[Segment] = []
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0
        self._expandable = expandable
        # free blocks of the large and of the small pool, by size and address
        self._free: tuple[list[tuple[int, int, Block]], ...] = ([], [])
        self._growing: dict[bool, Segment] = {}

    def allocate(self, n_bytes: int) -> Block:
        """Return a block of at least `n_bytes` bytes."""
        size = rounded(n_bytes)
        small = size <= SMALL
        free = self._free[small]
        place = bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._grown(size, small)
        block.free = False
        excess = block.size - size
        if excess >= SMALLEST if small or self._expandable else excess > SMALL:
            rest = Block(block.address + size, excess, small, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._keep(rest)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Give a block back; it is merged with free neighbours."""
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free:
                continue
            self._drop(neighbour)
            first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        self._keep(block)

    def _keep(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.address, block))

    def _drop(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.address))]

    def _grown(self, size: int, small: bool) -> Block:
        """Return a block of at least `size` bytes in memory that is reserved now."""
        if not self._expandable:
            unit = ROUND_LARGE if size >= LEAST_OWN_SEGMENT else LARGE_SEGMENT
            return self._reserved(Block(0, SMALL_SEGMENT if small else rounded(size, unit), small)).first
        unit = SMALL_SEGMENT if small else LARGE_SEGMENT
        if small not in self._growing:
            segment = self._growing[small] = self._reserved(Block(0, rounded(size, unit), small))
            return segment.first
        segment = self._growing[small]
        last = segment.first
        while last.after is not None:
            last = last.after
        if last.free:
            self._drop(last)
        else:
            last.after = Block(last.address + last.size, 0, small, before=last)
            last = last.after
        more = rounded(size - last.size, unit)
        last.size += more
        segment.size += more
        self._add(more)
        return last

    def _reserved(self, block: Block) -> Segment:
        block.address = ADDRESSES * (len(self.segments) + 1)
        self.segments.append(Segment(block, block.size))
        self._add(block.size)
        return self.segments[-1]

    def _add(self, n_bytes: int) -> None:
        self.reserved += n_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
