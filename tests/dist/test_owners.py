"""Owner vectors: every operation on runs is the same operation on the vector that the runs stand for."""

import random

from lightning_amp.dist.owners import Owners


def _vector(owners: Owners) -> list[int]:
    return [rank for length, rank in owners.expanded() for _ in range(length)]


def _blocks(vector: list[int], n: int) -> list[list[int]]:
    return [vector[i : i + n] for i in range(0, len(vector), n)]


def test_every_operation_is_that_of_the_vector() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        size = draw.randint(1, 4)
        base = [draw.randrange(size) for _ in range(draw.randint(1, 12))]
        base = sorted(base) if draw.random() < 0.3 else base
        vector = base * draw.choice([1, 1, 2, 3])
        n, k = len(vector), draw.randint(1, 3)
        owners = Owners.from_vector(vector, size)
        assert _vector(owners) == vector
        assert owners.counts == tuple(vector.count(rank) for rank in range(size))
        # equal vectors are one object, whatever way they were made
        assert owners.repeated(k) is Owners.from_vector(vector * k, size)
        assert owners.widened(k) is Owners.from_vector([rank for rank in vector for _ in range(k)], size)
        if n % k == 0:
            rows, columns = _blocks(vector, k), _blocks(vector, n // k)
            outer, inner = owners.outer(k), owners.inner(k)
            assert (outer is not None) == all(len(set(row)) == 1 for row in rows)
            assert outer is None or _vector(outer) == [row[0] for row in rows]
            assert (inner is not None) == all(column == columns[0] for column in columns)
            assert inner is None or _vector(inner) == columns[0]
        start = draw.randint(0, n)
        indices = range(n)[start : draw.randint(start, n) : draw.choice([1, 1, 2, 3])]
        for some in (indices, indices[::-1], range(n)[::-1]):
            assert owners.take(some) is Owners.from_vector([vector[i] for i in some], size)
            for rank in range(size):
                own = [i for i, owner in enumerate(vector) if owner == rank]
                places = [p for one in owners.local(rank, some) for p in one]
                assert [own[p] for p in places] == [i for i in some if vector[i] == rank]
        assert owners.proportional(7).n == 7
        assert Owners.joined([owners, owners], size) is Owners.from_vector(vector * 2, size)


def test_sizes_are_those_of_parts_in_the_order_of_the_ranks() -> None:
    assert Owners.even(7, 3).sizes == (3, 2, 2)
    assert Owners.contiguous([2, 5]).sizes == (2, 5)
    assert Owners.even(7, 3).repeated(2).sizes is None
    assert Owners.even(7, 3).take(range(7)[::-1]).sizes is None
