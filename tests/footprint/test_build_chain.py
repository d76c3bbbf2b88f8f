"""Claim: bytes of both forms of a block at every moment of a step made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_amp.footprint.chain.build_chain import build_chain
from lightning_amp.footprint.chain.chain import Chain


def life(n_bytes: int, birth: int, death: int) -> Any:
    return SimpleNamespace(n_bytes=n_bytes, birth=birth, death=death)


def use(of: Any, call: int | None, start: int, end: int) -> Any:
    return SimpleNamespace(life=of, call=call, start=start, read=end, end=end)


def step(*, gradient: int = 20, old: int = 0, late: int = 0) -> Any:
    """One block: operators 1 to 3 forward, 6 and 7 backward; operator 4 reads what it returns, 5 is its backward.

    The block makes 100 bytes that only autograd keeps, until 6; 50 that nobody keeps; and returns 7, which operator 4
    keeps until 5 and the block itself until 7. Beside it: 30 bytes made by 5 and read by 6; `gradient` made by 6,
    `late` by 7; `old` are there until 4.
    """
    kept, passing, returned = life(100, 1, 1), life(50, 2, 2), life(7, 3, 4)
    call = SimpleNamespace(
        fqn="block", start=1, end=3, first_order=1, last_order=3, seconds=1.0, inputs=[], input_bytes=0,
        outputs=[returned], parameter_bytes=0, fixed="", after=0,
    )  # fmt: skip
    return SimpleNamespace(
        lives=[
            kept, passing, returned, life(30, 5, 6), life(gradient, 6, 7), life(late, 7, 8), life(old, 0, 4),
        ],
        work=[("forward", "")] * 5 + [("backward", "")] * 3 + [("optimiser", "")],
        orders=[-1, 1, 2, 2, 4, 4, 2, 1, -1],
        calls=[call],
        uses=[use(kept, 0, 1, 6), use(returned, 0, 3, 7), use(returned, None, 3, 5)],
        read_last={},
    )  # fmt: skip


def most(chain: Chain, *, recomputed: bool) -> dict[tuple[int, ...], int]:
    """Bytes of the block's own moments, by the shared tensors that are alive beside them."""
    return {m.alive: m.n_bytes for m in chain.moments if m.block == 0 and m.form == recomputed}


def test_what_a_block_holds_between_its_passes() -> None:
    chain = build_chain(step(), values=False)
    (block,) = chain.blocks
    assert block.saved_bytes == 100
    assert block.work_bytes == 100 + 50
    assert chain.tensors == (7,)
    assert (block.keeps, block.inputs) == ((0,), ())


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # it runs again beside the gradient that came in
        ({}, 30 + 100 + 50),
        # operator 6, with a result of its own beside what was kept
        ({"gradient": 60}, 30 + 60 + 100 + 7),
        # its first pass: operator 1, of which nothing is left at operator 2
        ({"old": 500}, 500 + 100),
    ],
)
def test_forward_and_backward_pass_of_a_block_that_is_recomputed(
    sizes: dict[str, int], expected: int
) -> None:
    chain = build_chain(step(**sizes), values=False)
    assert most(chain, recomputed=True)[()] == expected
