"""Techniques of the last resort are combined with others where that is faster, and are not tried where it cannot be."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_amp.costs.device_rates import rates_for
from lightning_amp.costs.profiled_step import TIE, ProfiledStep
from lightning_amp.footprint.chain.chain import RECOMPUTED, BlockCost, Chain, ChainMoment
from lightning_amp.planning.modules import candidates
from lightning_amp.planning.modules.candidates import PREDICTIONS, compare
from lightning_amp.planning.modules.plan_module import plan_module
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterShape, ParameterUnit
from tests.planning.modules.facts import with_units
from tests.planning.modules.test_plan_of_a_module import NAMES, base, profiled

GIB = 2**30
HELD, SAVED = 4 * GIB, 2 * GIB
"""Bytes of parameters, gradients and state, of which the state is a half; bytes that five blocks keep."""
BUDGET = HELD + GIB // 10
"""What the step without its state needs, or that with one block's bytes and few gradients at a time."""


def on_gpu(forward_seconds: float, device: str = "H100") -> ProfiledStep:
    """A step that `host_optimizer` alone brings below the budget, and so do `recompute` and `early_update` together."""
    each = SAVED // len(NAMES)
    blocks = tuple(BlockCost(fqn=fqn, forward_seconds=forward_seconds, saved_bytes=each) for fqn in NAMES)
    moments = [ChainMoment(n_bytes=HELD, after=len(NAMES))]
    moments += [ChainMoment(n_bytes=HELD + each, after=k, block=k, form=RECOMPUTED) for k in range(len(NAMES))]
    chain = Chain(blocks=blocks, moments=tuple(moments), seconds=4 * len(NAMES) * forward_seconds)
    shape = ParameterShape(name="weight", shape=(GIB // len(NAMES),), item_bytes=1)
    units = (*(ParameterUnit(fqn=fqn, parameters=(shape,)) for fqn in NAMES), ParameterUnit(fqn="", parameters=()))
    step = ProfiledStep(profile=profiled(held=HELD, saved=SAVED), chain=chain, rates=rates_for(device))
    return with_units(step, units)


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Combinations with a technique of the last resort that are drafted."""
    names, draft = list[tuple[str, ...]](), candidates.draft

    def recorded(seen: Any, those: Any, **options: Any) -> Any:
        if len(those) > 1 and any(PREDICTIONS[name].last_resort for name in those):
            names.append(tuple(those))
        return draft(seen, those, **options)

    monkeypatch.setattr(candidates, "draft", recorded)
    return names


@pytest.mark.parametrize("device", ["H100", "RTX 4090"])
def test_more_memory_of_the_host_makes_no_plan_slower(device: str) -> None:
    step = on_gpu(0.02, device)
    without, beside = (plan_module(base(BUDGET), replace(step, host_memory=n_bytes)) for n_bytes in (2**10, 500 * GIB))
    assert without.strategies == ("recompute", "early_update")
    assert (beside.strategies, beside.rules) == (without.strategies, without.rules)
    alone = {one.strategies: one for one in beside.candidates}["host_optimizer",]
    assert alone.peak_bytes <= BUDGET
    assert alone.step_seconds > TIE * beside.candidates[0].step_seconds


def test_what_is_as_fast_as_they_could_be_is_enough(drafted: list[tuple[str, ...]]) -> None:
    # fits as it is
    assert compare(on_gpu(0.02), ranks=1, budget=HELD + SAVED).best.strategies == ()
    assert not drafted
    # one block runs again, which takes less than an update of either kind
    assert compare(on_gpu(1e-6), ranks=1, budget=HELD + SAVED - 1).best.strategies == ("recompute",)
    assert not drafted
    # to run blocks again takes longer than the host's update, beside which nothing is faster than it alone
    slow = replace(on_gpu(0.1), host_memory=3 * GIB)
    assert compare(slow, ranks=1, budget=BUDGET).best.strategies == ("host_optimizer",)
    assert drafted
    assert not [names for names in drafted if "host_optimizer" in names]


def test_several_ranks_draft_nothing_again_for_what_they_refuse() -> None:
    step = on_gpu(0.02)
    (way,) = PREDICTIONS["early_update"].variants(step, 2)  # type: ignore[misc]
    assert way == step
    (way,) = PREDICTIONS["early_update"].variants(step, 1)  # type: ignore[misc]
    assert way.frees_gradients
