"""Divides a global batch of cells among the ranks, equally many to each and with about equal contacts.

Uneven depth is what makes one rank wait for another: contacts per cell vary several-fold, so equal numbers of
cells are unequal work.
"""

import numpy as np
from numpy.typing import NDArray


def balance(contacts: NDArray[np.float64], n_ranks: int) -> list[NDArray[np.int64]]:
    """Divide cells with these contacts among ranks: equally many on each and, greedily, equal sums of contacts.

    The deepest cell goes first, each to the rank with the fewest contacts that still has room; then cells are swapped
    between the richest and the poorest rank while that helps. Deterministic; ties go to the lower rank. Returns for
    every
    rank the positions of its cells, ascending.
    """
    room = len(contacts) // n_ranks
    assert room * n_ranks == len(contacts), f"{len(contacts)} cells do not divide among {n_ranks} ranks"
    members: list[list[int]] = [[] for _ in range(n_ranks)]
    sums = np.zeros(n_ranks)
    for cell in np.argsort(-contacts, kind="stable"):
        rank = int(np.argmin([s if len(m) < room else np.inf for s, m in zip(sums, members, strict=True)]))
        members[rank].append(int(cell))
        sums[rank] += contacts[cell]
    parts = np.array(members, dtype=np.int64)
    # Each swap shrinks the spread of one pair; a few per rank take nearly all there is to gain.
    for _ in range(4 * n_ranks):
        if not _swap_once(parts, contacts):
            break
    return [np.sort(part) for part in parts]


def _swap_once(parts: NDArray[np.int64], contacts: NDArray[np.float64]) -> bool:
    """Swap the pair of cells that best evens out the richest and the poorest rank; False when none helps."""
    sums = contacts[parts].sum(axis=1)
    rich, poor = int(sums.argmax()), int(sums.argmin())
    gap = sums[rich] - sums[poor]
    moved = contacts[parts[rich]][:, None] - contacts[parts[poor]][None, :]
    i, j = np.unravel_index(np.abs(gap - 2 * moved).argmin(), moved.shape)
    if abs(gap - 2 * moved[i, j]) >= gap:
        return False
    parts[rich, i], parts[poor, j] = parts[poor, j], parts[rich, i]
    return True
