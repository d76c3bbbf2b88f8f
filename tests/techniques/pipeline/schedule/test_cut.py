"""Claim: layers are cut as trying all cuts would, exactly, on unequal devices, with sendings and caps, or refused."""

import random
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise
from math import inf, nan
from typing import Any

import numpy as np
import pytest

import lightning_amp
from lightning_amp import PlanError, cut_pipeline
from lightning_amp.techniques.pipeline.schedule.stage_bytes import filled


@dataclass
class Instance:
    """Layers and devices, every number as `cut_pipeline` takes it."""

    forward: list[float]
    backward: list[float]
    send_forward: list[float]
    send_backward: list[float]
    speeds: list[float]
    rows: list[list[float]]
    caps: list[float]

    def times(self, ends: tuple[int, ...]) -> tuple[Fraction, Fraction]:
        """The exact rho of Eq. 8, forward and backward, stage by stage; a device without layers does nothing."""
        f = b = Fraction(0)
        for speed, (start, end) in zip(self.speeds, pairwise((0, *ends)), strict=False):
            if start == end:
                continue
            f = max(f, sum(map(Fraction, self.forward[start:end])) / Fraction(speed))
            b = max(b, sum(map(Fraction, self.backward[start:end])) / Fraction(speed))
            if end < len(self.forward):
                f, b = max(f, Fraction(self.send_forward[end - 1])), max(b, Fraction(self.send_backward[end]))
        return f, b

    def fits(self, ends: tuple[int, ...]) -> bool:
        """Whether every stage keeps to its cap."""
        runs = zip(self.rows, self.caps, pairwise((0, *ends)), strict=False)
        return all(sum(row[start:end]) <= cap for row, cap, (start, end) in runs)

    def least(self) -> Fraction | None:
        """All cuts tried; None: none fits."""
        layers, stages = len(self.forward), len(self.speeds)
        tried = ((*ends, layers) for ends in combinations_with_replacement(range(layers + 1), stages - 1))
        return min((sum(self.times(ends)) for ends in tried if self.fits(ends)), default=None)


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
    four = [[factor * number() for _ in range(layers)] for factor in (1, 1, sending, sending)]
    speeds = [rng.choice((rng.uniform(0.2, 2), 0.5, 1.0)) for _ in range(stages)]
    rows = [[float(rng.randrange(1, 10)) for _ in range(layers)] for _ in range(stages)]
    caps = [float(rng.randrange(5, 40)) for _ in range(stages)]
    kind = rng.choice(("no cap", "one cap", "a cap for each", "a row for each"))
    if kind != "a row for each":
        rows = rows[:1] * stages
    if kind in ("no cap", "one cap"):
        caps = [caps[0] if kind == "one cap" else inf] * stages
    keywords: dict[str, Any] = {"send_forward": four[2], "send_backward": four[3]} if sending else {}
    if rng.random() < 0.7:
        keywords["speeds"] = speeds
    else:
        speeds = [1.0] * stages
    if kind != "no cap":
        keywords["layer_bytes"] = rows if kind == "a row for each" else rows[0]
        keywords["stage_bytes"] = caps[0] if kind == "one cap" else caps
    return Instance(*four, speeds, rows, caps), keywords


def compare(seed: int) -> None:
    """The cut of one random instance against all cuts."""
    instance, keywords = draw(random.Random(seed))
    least, stages = instance.least(), len(instance.speeds)
    if least is None:
        with pytest.raises(PlanError, match="stages that take all they can hold the first"):
            cut_pipeline(instance.forward, instance.backward, stages, **keywords)
        return
    cut = cut_pipeline(instance.forward, instance.backward, stages, **keywords)
    f, b = instance.times(cut.ends)
    assert f + b == least
    assert (cut.rho_forward, cut.rho_backward) == (float(f), float(b))
    assert cut.total == cut.rho_forward + cut.rho_backward
    assert instance.fits(cut.ends)
    assert cut.ends[-1] == len(instance.forward)
    if "speeds" not in keywords and not isinstance(keywords.get("stage_bytes"), list):
        assert all(start < end for start, end in pairwise((0, *cut.ends))), "among equals none is idle in between"


@pytest.mark.parametrize("n", [400, pytest.param(10_000, marks=[pytest.mark.exhaustive, pytest.mark.release])])
def test_it_finds_what_trying_all_cuts_finds(n: int) -> None:
    for seed in range(n):
        compare(seed)


def test_known_answers() -> None:
    even = cut_pipeline([1, 1, 1, 1], [2, 2, 2, 2], 2)
    assert (even.ends, even.rho_forward, even.rho_backward, even.total) == ((2, 4), 2.0, 4.0, 6.0)
    # forward alone would cut after the first layer, backward alone before the last
    assert cut_pipeline([4, 1, 1, 1], [1, 2, 2, 9], 2).ends == (3, 4)
    # a device of half the speed gets a third
    assert cut_pipeline([1] * 6, [0] * 6, 2, speeds=[1, 0.5]).ends == (4, 6)
    assert lightning_amp.PipelineCut is type(even)


def test_sendings_count_where_equation_8_counts_them() -> None:
    # what the last layer of a stage returns, and the gradient that the first layer of the next one returns
    assert cut_pipeline([1, 1], [1, 1], 2, send_forward=[1.5, 9], send_backward=[9, 1.75]).total == 3.25
    # neither is added to what a stage computes
    assert cut_pipeline([3, 3], [3, 3], 2, send_forward=[3, 0], send_backward=[0, 3]).total == 6
    # where sending takes longer than computing everything, one stage is best
    slow = cut_pipeline([1, 1], [1, 1], 2, send_forward=[5, 5], send_backward=[5, 5])
    assert (slow.ends, slow.total) == ((2,), 4.0)
    # a stage goes past places where a cut would be too expensive
    assert cut_pipeline([1] * 5, [1] * 5, 2, send_forward=[9, 9, 9, 1, 9]).ends == (4, 5)


def test_a_device_that_would_hold_the_others_up_is_left_idle() -> None:
    cut = cut_pipeline([1, 1, 1, 1], [1, 1, 1, 1], 3, speeds=[1, 0.1, 1])
    assert (cut.ends, cut.total) == ((2, 2, 4), 4.0)
    assert cut_pipeline([1, 1], [1, 1], 5).ends == (1, 2)


def test_rounding_does_not_decide() -> None:
    # the small time is lost in a float's sum, and the second cut only loses it too
    assert cut_pipeline([2.0**60, 1.0, 2.0**60, 2.0], [0] * 4, 2).ends == (2, 4)
    # of floats 0.1 + 0.2 is more than 0.3
    assert cut_pipeline([0.3, 0.1, 0.2], [0, 0, 0], 2).ends == (1, 3)


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
