"""Determine which entries of parameters have to be on one rank, with disjoint sets of entries (atoms).

Every entry of a dim that may be split is an atom, for each mesh axis. A tensor has a grid for each axis: an integer
array that broadcasts against the tensor's shape and contains the atom of each entry. An operator that needs several
entries on one rank, such as a head of attention, unites their sets. At the end, sets are assigned to ranks in runs.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

AtomGrid = NDArray[np.int64]
MOST = 4096
"""Most atoms of a dim; in a longer dim, an atom is a block of entries."""


class Atoms:
    """Sets of atoms, for all axes that split anything; `sizes` are the ranks of each axis."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self._set = {axis: np.zeros(0, np.int64) for axis in sizes}
        self._family = {axis: np.zeros(0, np.int64) for axis in sizes}
        self._weight = {axis: np.zeros(0, np.int64) for axis in sizes}
        self._families = 0

    def fresh(self, axis: str, n: int) -> AtomGrid:
        """Create atoms for a dim of n entries."""
        block = -(-n // MOST)
        first, count = len(self._set[axis]), -(-n // block)
        ids = np.arange(first, first + count)
        self._set[axis] = np.concatenate([self._set[axis], ids])
        self._family[axis] = np.concatenate([self._family[axis], np.full(count, self._families)])
        weights = np.full(count, block)
        weights[-1] = n - block * (count - 1)
        self._weight[axis] = np.concatenate([self._weight[axis], weights])
        self._families += 1
        return ids.repeat(block)[:n]

    def now(self, axis: str, grid: AtomGrid) -> AtomGrid:
        """Replace atoms by their current sets, with size 1 along dims where the grid does not vary."""
        return collapsed(self._set[axis][grid])

    def unite(self, axis: str, a: AtomGrid, b: AtomGrid) -> bool:
        """Unite entries of two grids; returns False, without a change, if a dim would have fewer sets than ranks."""
        sets = self._set[axis]
        left, right = (sets[grid].ravel() for grid in np.broadcast_arrays(a, b))
        unlike = left != right
        left, right = left[unlike], right[unlike]
        if not len(left):
            return True
        # sets are nodes, and pairs of entries are edges: each component becomes one set, named by its least member
        known = np.unique(np.concatenate([left, right]))
        edges = np.searchsorted(known, left), np.searchsorted(known, right)
        n, part = connected_components(
            coo_array((np.ones(len(left)), edges), shape=(len(known), len(known))), directed=False
        )
        first = np.full(n, np.iinfo(np.int64).max)
        np.minimum.at(first, part, known)
        touched = np.isin(sets, known)
        new = sets.copy()
        new[touched] = first[part[np.searchsorted(known, sets[touched])]]
        # Every dim that the union touches is checked, not only those of the tensor: sets are shared, and the dim of
        # another parameter may be left with fewer sets than ranks.
        for family in np.unique(self._family[axis][touched]):
            if len(np.unique(new[self._family[axis] == family])) < self.sizes[axis]:
                return False
        self._set[axis] = new
        return True

    def owners(self, axis: str) -> AtomGrid:
        """Return the rank of every atom.

        Dims that share sets are handled together: their sets are assigned to ranks in the order of their first atoms,
        by weight, so that the runs of ranks are as even as the sets allow.
        """
        sets, family, size = self._set[axis], self._family[axis], self.sizes[axis]
        n = len(sets)
        shape = (n + self._families, n + self._families)
        _, group = connected_components(coo_array((np.ones(n), (sets, family + n)), shape=shape), directed=False)
        rank = np.zeros(n, np.int64)
        # atoms of one set, and sets of one family, are in one group
        for one in np.unique(group[sets]) if n else ():
            at = np.nonzero(group[sets] == one)[0]
            _, inverse = np.unique(sets[at], return_inverse=True)
            weight = np.bincount(inverse, self._weight[axis][at])
            # the middle of a set determines the rank, in an even division of the total weight
            middle = np.cumsum(weight) - weight / 2
            rank[at] = np.minimum((middle * size / weight.sum()).astype(np.int64), size - 1)[inverse]
        return rank


def collapsed(grid: AtomGrid) -> AtomGrid:
    """Reduce dims along which a grid does not vary to size 1."""
    for dim, n in enumerate(grid.shape):
        first = grid.take([0], dim)
        if n > 1 and (grid == first).all():
            grid = first
    return grid


def varying(grid: AtomGrid) -> list[int]:
    """Dims along which a grid varies."""
    return [dim for dim, n in enumerate(grid.shape) if n > 1]
