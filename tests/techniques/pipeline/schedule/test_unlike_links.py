"""Claim: over links that differ, layers are cut as trying all cuts would, exactly; equal links give the cut of one."""

import random
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise
from math import inf
from typing import Any

import numpy as np
import pytest

from lightning_amp import PipelineCut, PlanError, cut_pipeline


@dataclass
class Instance:
    """Layers, devices and the link after every stage: seconds to start a message, and seconds of a byte."""

    forward: list[float]
    backward: list[float]
    sent: list[float]
    links: list[tuple[float, float]]
    speeds: list[float]
    rows: list[list[float]]
    caps: list[float]
    micro_batches: int

    def sends(self) -> tuple[list[list[float]], list[list[float]]]:
        """Of every stage, as `cut_pipeline` takes them: a stage's gradients go over the link before it."""
        by_link = [[start + n * each for n in self.sent] for start, each in self.links]
        return [*by_link, [0.0] * len(self.sent)], [[0.0, *row[:-1]] for row in ([0.0] * len(self.sent), *by_link)]

    def keywords(self) -> dict[str, Any]:
        """All that a cut depends on."""
        on, back = self.sends()
        return {
            **{"forward": self.forward, "backward": self.backward, "n_stages": len(self.speeds)},
            **{"send_forward": on, "send_backward": back, "speeds": self.speeds},
            **{"layer_bytes": self.rows, "stage_bytes": self.caps, "micro_batches": self.micro_batches},
        }

    def fits(self, ends: tuple[int, ...]) -> bool:
        """Whether every stage keeps to its cap."""
        runs = zip(self.rows, self.caps, pairwise((0, *ends)), strict=True)
        return all(sum(row[start:end]) <= cap for row, cap, (start, end) in runs)

    def step(self, ends: tuple[int, ...]) -> tuple[Fraction, Fraction, Fraction]:
        """The exact time of a step by Eq. 8, rho_2 and rho_1."""
        on, back = self.sends()
        once, f, b = Fraction(0), Fraction(0), Fraction(0)
        for n, (speed, (start, end)) in enumerate(zip(self.speeds, pairwise((0, *ends)), strict=True)):
            there, returns = (
                sum(map(Fraction, layers[start:end])) / Fraction(speed) for layers in (self.forward, self.backward)
            )
            goes = Fraction(on[n][end - 1] if end < len(self.forward) else 0)
            comes = Fraction(back[n][start] if start else 0)
            once += there + returns + goes + comes
            f, b = max(f, there, goes), max(b, returns, comes)
        return once + (self.micro_batches - 1) * (f + b), f, b

    def least(self) -> Fraction | None:
        """All cuts tried; None: none fits."""
        layers = len(self.forward)
        tried = ((*ends, layers) for ends in combinations(range(1, layers), len(self.speeds) - 1))
        return min((self.step(ends)[0] for ends in tried if self.fits(ends)), default=None)


def draw(rng: random.Random) -> Instance:
    """Two to five stages, and up to ten layers."""
    stages = rng.randrange(2, 6)
    layers = rng.randrange(stages, 11)
    number = rng.choice((lambda: rng.randrange(1, 5), lambda: rng.uniform(50, 100), lambda: rng.random() ** 3))
    forward, backward, sent = ([float(number()) for _ in range(layers)] for _ in range(3))
    if rng.random() < 0.5:
        backward = [2 * time for time in forward]
    return Instance(
        forward=forward,
        backward=backward,
        sent=sent,
        links=[(rng.choice((0.0, number())), rng.choice((0.0, 0.1, 1.0, 5.0))) for _ in range(stages - 1)],
        speeds=[rng.choice((0.5, 1.0, rng.uniform(0.2, 2))) for _ in range(stages)],
        rows=[[float(rng.randrange(1, 10)) for _ in range(layers)] for _ in range(stages)],
        caps=[rng.choice((inf, 1e9, float(rng.randrange(5, 40)))) for _ in range(stages)],
        micro_batches=rng.choice((1, 2, 4, 32)),
    )


def compare(seed: int) -> bool:
    """The cut of one instance against all cuts; whether there is one."""
    instance = draw(random.Random(seed))
    instance.caps = [1e9 if cap == inf else cap for cap in instance.caps]
    on, back = instance.sends()
    if all(row == on[0] for row in on) and all(row == back[0] for row in back):
        return False
    least = instance.least()
    if least is None:
        with pytest.raises(PlanError, match="as unlike links require"):
            cut_pipeline(**instance.keywords())
        return False
    cut = cut_pipeline(**instance.keywords())
    step, f, b = instance.step(cut.ends)
    assert (step, float(f), float(b)) == (least, cut.rho_forward, cut.rho_backward), seed
    assert instance.fits(cut.ends)
    return True


@pytest.mark.parametrize("n", [600, pytest.param(10_000, marks=[pytest.mark.exhaustive, pytest.mark.release])])
def test_it_finds_what_trying_all_cuts_finds(n: int) -> None:
    assert sum(compare(seed) for seed in range(n)) > 0.6 * n


def test_little_is_sent_where_the_link_is_slow() -> None:
    """Six equal layers, of which the third and the fourth return little; the second of two links is slow."""
    layers, sent = [1.0] * 6, np.array([8.0, 8.0, 1.0, 1.0, 8.0, 0.0])

    def cut(*seconds_of_a_byte: float) -> PipelineCut:
        on = np.array([sent * each for each in (*seconds_of_a_byte, 0.0)])
        back = np.roll(on, (1, 1), (0, 1))
        back[:, 0] = 0
        return cut_pipeline(layers, layers, 3, send_forward=on, send_backward=back, micro_batches=8)

    assert (cut(0.1, 1.0).ends, cut(0.1, 1.0).total) == ((2, 4, 6), 4.0)
    # at the slower link everywhere, the first cut avoids what the fast link carries in no time
    assert (cut(1.0, 1.0).ends, cut(1.0, 1.0).total) == ((3, 4, 6), 6.0)


def test_it_refuses() -> None:
    known: dict[str, Any] = {"forward": [1, 1], "backward": [1, 1], "n_stages": 2}
    with pytest.raises(PlanError, match="micro_batches=None is not supported"):
        cut_pipeline(**known, send_forward=[[1, 1], [2, 2]])
    with pytest.raises(PlanError, match="send_forward got 3 rows; allowed are"):
        cut_pipeline(**known, send_forward=[[1, 1]] * 3)
    with pytest.raises(PlanError, match="2 layers on 3 stages .* each stage has a layer"):
        cut_pipeline(**known | {"n_stages": 3}, send_forward=[[1, 1], [2, 2], [1, 1]], micro_batches=2)
