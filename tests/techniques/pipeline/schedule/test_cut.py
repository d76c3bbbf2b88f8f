"""Claim: layers are cut as trying all cuts would, exactly, on unequal devices and links, with caps, or refused."""

import random
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, pairwise
from math import inf, nan
from typing import Any

import numpy as np
import pytest

import lightning_amp
from lightning_amp import PipelineCut, PlanError, cut_pipeline
from lightning_amp.techniques.pipeline.schedule.cut import filled


@dataclass
class Instance:
    """Layers and devices; `on` and `back` have a row for every stage: its gradients go over the link before it."""

    forward: list[float]
    backward: list[float]
    on: list[list[float]]
    back: list[list[float]]
    speeds: list[float]
    rows: list[list[float]]
    caps: list[float]
    micro_batches: int = 1

    def fits(self, ends: tuple[int, ...]) -> bool:
        """Whether every stage keeps to its cap."""
        runs = zip(self.rows, self.caps, pairwise((0, *ends)), strict=False)
        return all(sum(row[start:end]) <= cap for row, cap, (start, end) in runs)

    def step(self, ends: tuple[int, ...]) -> tuple[Fraction, Fraction, Fraction]:
        """The exact time of a step by Eq. 8, rho_2 and rho_1; a device without layers does nothing."""
        once = f = b = Fraction(0)
        for n, (speed, (start, end)) in enumerate(zip(self.speeds, pairwise((0, *ends)), strict=False)):
            if start == end:
                continue
            there, returns = (
                sum(map(Fraction, layers[start:end])) / Fraction(speed) for layers in (self.forward, self.backward)
            )
            goes = Fraction(self.on[n][end - 1] if end < len(self.forward) else 0)
            comes = Fraction(self.back[n][start] if start else 0)
            once += there + returns + goes + comes
            f, b = max(f, there, goes), max(b, returns, comes)
        return once + (self.micro_batches - 1) * (f + b), f, b

    def compare(self, keywords: dict[str, Any], *, unlike: bool) -> PipelineCut | None:
        """The cut against all cuts: of the least step where links differ, else of the least rho_1 + rho_2; None: none
        fits.
        """
        layers, stages = len(self.forward), len(self.speeds)
        inner = combinations(range(1, layers), stages - 1)
        tried = inner if unlike else combinations_with_replacement(range(layers + 1), stages - 1)
        every = (self.step((*ends, layers)) for ends in tried if self.fits((*ends, layers)))
        least = min((step if unlike else f + b for step, f, b in every), default=None)
        if least is None:
            why = "as unlike links require" if unlike else "stages that take all they can hold the first"
            with pytest.raises(PlanError, match=why):
                cut_pipeline(self.forward, self.backward, stages, **keywords)
            return None
        cut = cut_pipeline(self.forward, self.backward, stages, **keywords)
        step, f, b = self.step(cut.ends)
        assert (step if unlike else f + b) == least
        assert (cut.rho_forward, cut.rho_backward) == (float(f), float(b))
        assert cut.total == cut.rho_forward + cut.rho_backward
        assert self.fits(cut.ends)
        assert cut.ends[-1] == layers
        return cut


def draw(rng: random.Random) -> tuple[Instance, dict[str, Any]]:
    """An instance, and the keywords that say it."""
    layers, stages = rng.randrange(1, 9), rng.randrange(1, 5)
    number = rng.choice(
        (
            lambda: rng.randrange(5),
            lambda: rng.uniform(50, 100),
            lambda: rng.randrange(1, 30) / 10,
            lambda: 10 ** rng.uniform(-6, 6),
        )
    )
    sending = rng.choice((0, 1, 5))
    there, back, on, returned = ([factor * number() for _ in range(layers)] for factor in (1, 1, sending, sending))
    speeds = [rng.choice((rng.uniform(0.2, 2), 0.5, 1.0)) for _ in range(stages)]
    rows = [[float(rng.randrange(1, 10)) for _ in range(layers)] for _ in range(stages)]
    caps = [float(rng.randrange(5, 40)) for _ in range(stages)]
    kind = rng.choice(("no cap", "one cap", "a cap for each", "a row for each"))
    if kind != "a row for each":
        rows = rows[:1] * stages
    if kind in ("no cap", "one cap"):
        caps = [caps[0] if kind == "one cap" else inf] * stages
    keywords: dict[str, Any] = {"send_forward": on, "send_backward": returned} if sending else {}
    if rng.random() < 0.7:
        keywords["speeds"] = speeds
    else:
        speeds = [1.0] * stages
    if kind != "no cap":
        keywords["layer_bytes"] = rows if kind == "a row for each" else rows[0]
        keywords["stage_bytes"] = caps[0] if kind == "one cap" else caps
    return Instance(there, back, [on] * stages, [returned] * stages, speeds, rows, caps), keywords


def draw_unlike(rng: random.Random) -> tuple[Instance, dict[str, Any]]:
    """Two to five stages, and up to ten layers; of every link seconds to start a message, and seconds of a byte."""
    stages = rng.randrange(2, 6)
    layers = rng.randrange(stages, 11)
    number = rng.choice((lambda: rng.randrange(1, 5), lambda: rng.uniform(50, 100), lambda: rng.random() ** 3))
    forward, backward, sent = ([float(number()) for _ in range(layers)] for _ in range(3))
    if rng.random() < 0.5:
        backward = [2 * time for time in forward]
    links = [(rng.choice((0.0, number())), rng.choice((0.0, 0.1, 1.0, 5.0))) for _ in range(stages - 1)]
    by_link, none = [[start + n * each for n in sent] for start, each in links], [0.0] * layers
    instance = Instance(
        forward=forward,
        backward=backward,
        on=[*by_link, none],
        back=[[0.0, *row[:-1]] for row in (none, *by_link)],
        speeds=[rng.choice((0.5, 1.0, rng.uniform(0.2, 2))) for _ in range(stages)],
        rows=[[float(rng.randrange(1, 10)) for _ in range(layers)] for _ in range(stages)],
        caps=[rng.choice((1e9, 1e9, float(rng.randrange(5, 40)))) for _ in range(stages)],
        micro_batches=rng.choice((1, 2, 4, 32)),
    )
    return instance, {
        **{"send_forward": instance.on, "send_backward": instance.back, "speeds": instance.speeds},
        **{"layer_bytes": instance.rows, "stage_bytes": instance.caps, "micro_batches": instance.micro_batches},
    }


MORE = pytest.param(10_000, marks=[pytest.mark.exhaustive, pytest.mark.release])


@pytest.mark.parametrize("n", [400, MORE])
def test_it_finds_what_trying_all_cuts_finds(n: int) -> None:
    for seed in range(n):
        instance, keywords = draw(random.Random(seed))
        cut = instance.compare(keywords, unlike=False)
        if cut and "speeds" not in keywords and not isinstance(keywords.get("stage_bytes"), list):
            assert all(start < end for start, end in pairwise((0, *cut.ends))), "among equals none is idle in between"


@pytest.mark.parametrize("n", [600, MORE])
def test_it_finds_what_trying_all_cuts_finds_over_unlike_links(n: int) -> None:
    found = 0
    for seed in range(n):
        instance, keywords = draw_unlike(random.Random(seed))
        if any(row != rows[0] for rows in (instance.on, instance.back) for row in rows):
            found += instance.compare(keywords, unlike=True) is not None
    assert found > 0.6 * n


def test_known_answers() -> None:
    even = cut_pipeline([1, 1, 1, 1], [2, 2, 2, 2], 2)
    assert (even.ends, even.rho_forward, even.rho_backward, even.total) == ((2, 4), 2.0, 4.0, 6.0)
    # forward alone would cut after the first layer, backward alone before the last
    assert cut_pipeline([4, 1, 1, 1], [1, 2, 2, 9], 2).ends == (3, 4)
    # a device of half the speed gets a third
    assert cut_pipeline([1] * 6, [0] * 6, 2, speeds=[1, 0.5]).ends == (4, 6)
    assert lightning_amp.PipelineCut is type(even)


def test_it_keeps_up_with_many_layers() -> None:
    rng = random.Random(0)
    forward, backward, on, back = ([rng.uniform(50, 100) for _ in range(10_000)] for _ in range(4))
    cut = cut_pipeline(forward, backward, 50, send_forward=on, send_backward=back)
    assert cut.total <= 1.02 * (sum(forward) + sum(backward)) / 50


GOOD: dict[str, Any] = {"forward": [1, 2], "backward": [1, 2], "n_stages": 2}


@pytest.mark.parametrize(("changed", "message"), [
    ({"n_stages": 0}, "n_stages=0 is not supported; allowed is a whole number of 1 or more"),
    ({"forward": []}, "forward got 0 numbers; allowed are one or more"),
    ({"forward": "12"}, "forward='12' is not supported; allowed is a list of numbers"),
    ({"forward": [1, nan]}, r"forward\[1\]=nan is not supported; allowed are numbers from 0"),
    ({"forward": [1, True]}, r"forward\[1\]=True is not supported"),
    ({"backward": [-1, 1]}, r"backward\[0\]=-1 is not supported; allowed are numbers from 0"),
    ({"send_forward": [1, 1, 1]}, "send_forward got 3 numbers; allowed are 2"),
    ({"speeds": [1]}, "speeds got 1 numbers; allowed are 2"),
    ({"speeds": [1, 0]}, r"speeds\[1\]=0 is not supported; allowed are numbers above 0"),
    ({"layer_bytes": [[1, 1]], "stage_bytes": 1}, "layer_bytes got 1 rows; allowed are"),
    ({"layer_bytes": np.array(4), "stage_bytes": 4}, "layer_bytes=4 is not supported; allowed is a list"),
    ({"send_forward": [[1, 1], [2, 2]]}, "micro_batches=None is not supported"),
    ({"send_forward": [[1, 1]] * 3}, "send_forward got 3 rows; allowed are"),
    ({"n_stages": 3, "send_forward": [[1, 1], [2, 2], [1, 1]], "micro_batches": 2},
     "2 layers on 3 stages .* each stage has a layer"),
    ({"stage_bytes": 4}, "stage_bytes=4 requires layer_bytes"),
    ({"layer_bytes": [1, 3], "stage_bytes": 2}, "hold the first 1 layers and no more: allow more bytes"),
])  # fmt: skip
def test_it_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        cut_pipeline(**GOOD | changed)


def test_as_many_stages_as_there_are_have_blocks() -> None:
    # caps of ranks may leave the first stage, or others, without a block
    for ends in ((0, 2, 4), (0, 0, 4), (4,), (1, 1, 4), (2, 4)):
        found = filled(ends, 3, [1.0] * 4, ())
        assert len(found) == 3
        assert found[-1] == 4
        assert list(found) == sorted(set(found) - {0}), ends
