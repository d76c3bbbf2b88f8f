"""Claim: the choice of forms is the fastest of all that fit, on random chains of every kind, and never slower with more
bytes; the leanest choice is that of the least peak.
"""

import random
import time
from dataclasses import replace
from itertools import combinations, product

import pytest

from lightning_amp.costs import choose_forms as choose_module
from lightning_amp.costs.choose_forms import CLOSE, choose, leanest
from lightning_amp.footprint.chain.chain import (
    CHUNKED,
    KEPT,
    RECOMPUTED,
    BlockCost,
    Chain,
    ChainMoment,
    ChunkForm,
    extra_seconds,
    peak_bytes,
)
from tests.each import each


def cost(fqn: str, seconds: float = 1.0, saved: int = 0, **more: object) -> BlockCost:
    return BlockCost(fqn=fqn, forward_seconds=seconds, saved_bytes=saved, **more)  # type: ignore[arg-type]


def random_chain(draw: random.Random, n: int) -> Chain:
    """Shared tensors, blocks that are called again, blocks that stay, and sometimes two backward passes."""
    n_tensors, some = draw.randint(0, 4), lambda: tuple(k for k in range(n_tensors) if draw.random() < 0.3)
    names = [f"b.{draw.randrange(i + 1) if draw.random() < 0.15 else i}" for i in range(n)]
    blocks = tuple(
        cost(
            name, draw.randint(1, 9) / 2, draw.randint(0, 30), keeps=some(), inputs=some(),
            fixed="it is compiled" if draw.random() < 0.1 else "",
        )
        for name in names
    )  # fmt: skip
    cut = draw.randrange(1, n) if draw.random() < 0.3 and n > 1 else 0
    moments = [ChainMoment(n_bytes=draw.randint(0, 40), after=0)]
    for i in range(n):
        first = cut if i >= cut else 0
        for again in (False, True):
            moments.append(
                ChainMoment(n_bytes=draw.randint(0, 40), first=first, after=i, alive=some(), block=i, form=int(again))
            )
        if i + 1 != cut:
            moments.append(ChainMoment(n_bytes=draw.randint(0, 40), first=first, after=i + 1, alive=some()))
    return Chain(blocks=blocks, tensors=tuple(draw.randint(1, 20) for _ in range(n_tensors)), moments=tuple(moments))


def every_choice(chain: Chain) -> list[tuple[str, ...]]:
    return [c for n in range(len(chain.names) + 1) for c in combinations(chain.names, n)]


@each(seed=range(100))
def test_the_choice_is_that_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    chain = random_chain(draw, draw.randint(1, 9 if seed % 10 else 12))
    rows = [(peak_bytes(chain, c), extra_seconds(chain, c)) for c in every_choice(chain)]
    least, most = min(rows)[0], max(rows)[0]
    for budget in {0, least - 1, least, (least + most) // 2, (3 * least + most) // 4, most - 1, most}:
        found = choose(chain, max(0, budget))
        fitting = [seconds for n_bytes, seconds in rows if n_bytes <= budget]
        assert (found is None) == (not fitting)
        if found is not None:
            assert found.extra_seconds == pytest.approx(min(fitting))
            assert found.peak_bytes == peak_bytes(chain, found.recomputed) <= budget
            assert found.extra_seconds == extra_seconds(chain, found.recomputed)


def with_chunks(chain: Chain, draw: random.Random) -> Chain:
    """Up to two forms in chunks of every block, at each of its calls."""
    n_forms = {block.fqn: draw.randint(0, 2) for block in chain.blocks}
    blocks, moments = [], list(chain.moments)
    for i, block in enumerate(chain.blocks):
        keeps = [tuple(k for k in range(len(chain.tensors)) if draw.random() < 0.3) for _ in range(2)]
        forms = [
            ChunkForm(budget_bytes=9, saved_bytes=draw.randint(0, 9), keeps=k, extra_seconds=draw.randint(0, 9))
            for k in keeps[: n_forms[block.fqn]]
        ]
        (kept,) = (m for m in chain.moments if m.block == i and m.form == KEPT)
        blocks.append(replace(block, chunks=tuple(forms)))
        moments += [replace(kept, n_bytes=draw.randint(0, 40), form=CHUNKED + n) for n in range(n_forms[block.fqn])]
    return replace(chain, blocks=tuple(blocks), moments=tuple(moments))


@each(seed=range(40), recompute=(False, True))
def test_forms_in_chunks_are_chosen_as_by_brute_force(seed: int, recompute: bool) -> None:
    draw = random.Random(2000 + seed)
    chain = with_chunks(random_chain(draw, draw.randint(1, 5)), draw)
    n_chunks = {block.fqn: len(block.chunks) for block in chain.blocks}
    forms = [
        [KEPT, *([RECOMPUTED] if recompute and name in chain.names else []), *range(CHUNKED, CHUNKED + n)]
        for name, n in n_chunks.items()
    ]
    every = [dict(zip(n_chunks, choice, strict=True)) for choice in product(*forms)]
    rows = [(peak_bytes(chain, c), extra_seconds(chain, c)) for c in every]
    least, most = min(rows)[0], max(rows)[0]
    for budget in (least - 1, least, (least + most) // 2, most):
        found = choose(chain, max(0, budget), recompute=recompute, chunk=True)
        fitting = [seconds for n_bytes, seconds in rows if n_bytes <= budget]
        assert (found is None) == (not fitting)
        if found is not None:
            assert found.extra_seconds == pytest.approx(min(fitting))
            assert found.peak_bytes == peak_bytes(chain, found.forms) <= budget
            assert set(found.forms.values()) <= {f for options in forms for f in options} - {KEPT}
    lean = leanest(chain, recompute=recompute, chunk=True)
    assert least <= lean.peak_bytes <= least * (1 + CLOSE) + 1


def plain_chain(n: int, draw: random.Random | None = None) -> Chain:
    """Blocks one after the other, each of which is handed what the one before has made."""
    blocks, moments = [], []
    for i in range(n):
        saved = 100 + (draw.randrange(10**9) if draw else 0)
        # time as bytes, but not quite: the hardest case
        seconds = saved * (draw.uniform(0.9, 1.1) if draw else 1.0)
        keeps = (i - 1,) if i else ()
        blocks.append(cost(f"b.{i}", seconds, saved, keeps=keeps, inputs=keeps))
        moments.append(ChainMoment(n_bytes=saved, after=i, alive=keeps, block=i))
        moments.append(ChainMoment(n_bytes=saved + 5, after=i, alive=keeps, block=i, form=RECOMPUTED))
    return Chain(blocks=tuple(blocks), tensors=(10,) * n, moments=(*moments, ChainMoment(n_bytes=0, after=n)))


@pytest.mark.long
@pytest.mark.parametrize("calls", [2, 3])
def test_an_encoder_that_several_views_pass_is_planned(calls: int) -> None:
    """2^24 combinations of decisions are open between the first and the last view: not all are followed."""
    blocks = tuple(cost(f"b.{k}", 1 + k / 100, 1000 + k) for _ in range(calls) for k in range(24))
    works = (ChainMoment(n_bytes=1250, after=i, block=i, form=RECOMPUTED) for i in range(len(blocks)))
    chain = Chain(blocks=blocks, moments=(ChainMoment(n_bytes=200, after=len(blocks)), *works))
    whole = peak_bytes(chain, ())
    for share in (0.9, 0.6, 0.25):
        found = choose(chain, int(share * whole))
        assert found is not None
        assert found.peak_bytes <= share * whole
        # the first blocks save most bytes for their time
        firsts = (tuple(f"b.{k}" for k in range(n)) for n in range(25))
        best = next(names for names in firsts if peak_bytes(chain, names) <= share * whole)
        assert found.extra_seconds <= 1.03 * extra_seconds(chain, best)
    assert len(leanest(chain).forms) == 24


def test_what_was_not_followed_makes_no_choice_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_module, "MOST_KEYS", 2)
    for seed in range(30):
        draw = random.Random(seed)
        chain = random_chain(draw, 9)
        rows = [(peak_bytes(chain, c), extra_seconds(chain, c)) for c in every_choice(chain)]
        for budget in {min(rows)[0], (min(rows)[0] + max(rows)[0]) // 2, max(rows)[0]}:
            found = choose(chain, budget)
            if found is not None:
                assert (found.peak_bytes, found.extra_seconds) in rows
                assert found.peak_bytes <= budget


@pytest.mark.parametrize("hard", [False, True])
def test_two_hundred_blocks_take_no_second(hard: bool) -> None:
    chain = plain_chain(200, random.Random(1) if hard else None)
    all_bytes, least = peak_bytes(chain, ()), peak_bytes(chain, chain.names)
    start = time.process_time()
    found = choose(chain, (all_bytes + least) // 2)
    assert time.process_time() - start < 5, "a hang, not a target"
    # of the bytes that have to go, hardly more time than their share
    share = sum(b.forward_seconds for b in chain.blocks) * (all_bytes - found.peak_bytes) / all_bytes
    assert 0.85 * share < found.extra_seconds < 1.15 * share
