"""Random chains of operators that move values, on whole and on sharded tensors."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_amp.dist.splits import MeshAxis, Split, Splits
from lightning_amp.errors import ShardError
from tests.dist.check import compare, owners_of
from tests.dist.table.case import Case

Step = Callable[[Tensor], Tensor]


def _factors(n: int, draw: random.Random) -> tuple[int, int]:
    a = draw.choice([k for k in range(1, n + 1) if n % k == 0])
    return a, n // a


def step(shape: Sequence[int], draw: random.Random) -> Step:
    """One operator that a tensor of a shape can have."""
    n = len(shape)
    d, e = draw.randrange(n), draw.randrange(n)
    size = shape[d]
    start = draw.randrange(size)
    stop = draw.randrange(start + 1, size + 1)
    factors, shift, order = _factors(size, draw), draw.randrange(1, 9), draw.sample(range(n), n)
    steps: list[Step] = [
        lambda x: x.permute(order),
        lambda x: x.transpose(d, e),
        lambda x: x.unflatten(d, factors),
        lambda x: x.flatten(min(d, e), max(d, e)),
        lambda x: x.narrow(d, start, stop - start),
        lambda x: x[(slice(None),) * d + (slice(start, None, 2),)],
        lambda x: torch.cat([x, x.narrow(d, start, stop - start)], d),
        lambda x: torch.cat(x.chunk(3, d)[::-1], d),
        lambda x: x.flip(d),
        lambda x: x.roll(shift, d),
        lambda x: x.unsqueeze(d).expand(*shape[:d], 2, *shape[d:]),
        lambda x: x.select(d, start) if n > 1 else x * 2,
        lambda x: torch.stack([x, x * 2], d),
        lambda x: x.reshape(-1).reshape(*shape[::-1]),
        lambda x: x.repeat_interleave(2, d),
        lambda x: x * torch.arange(1, size + 1).view([-1, *[1] * (n - 1 - d)]),
        lambda x: x.index_select(d, torch.tensor([start, stop - 1, 0])),
    ]
    return draw.choice(steps)


def chain(seed: int) -> tuple[Case, int]:
    """A case of several operators, and the dim of its tensor that is split."""
    draw = random.Random(seed)
    shape = [draw.choice((1, 2, 4, 6, 7, 8)) for _ in range(draw.choice((2, 3, 4)))]
    dim = draw.randrange(len(shape))
    shape[dim] = draw.choice((6, 7, 8, 9))
    steps, x = [], torch.empty(shape, device="meta")
    while len(steps) < draw.choice((2, 4, 6)) and x.numel() < 5000 and x.dim() < 7:
        steps.append(step(x.shape, draw))
        x = steps[-1](x.cpu() if x.device.type == "cpu" else torch.zeros(x.shape))

    def call(x: Tensor) -> Tensor:
        for one in steps:
            x = one(x)
        return x

    return Case(f"chain {seed}", call, (tuple(shape),), {0: dim}), dim


def wrong_chains(axis: MeshAxis, n: int) -> tuple[list[str], int]:
    """Chains whose results or gradients differ, and the number of those that were refused."""
    wrong, refused = [], 0
    for seed in range(n):
        case, dim = chain(seed)
        how = ("even", "uneven", "mixed")[seed % 3]
        splits = Splits.of([Split(axis, dim, owners_of(case.inputs[0][dim], axis.size, how))])
        try:
            apart = compare(case, [splits], [axis])
        except ShardError:
            refused += 1
            continue
        if not apart <= 1e-12:
            wrong.append(f"{case.name} {case.inputs} {splits}: {apart:.1e}")
    return wrong, refused
