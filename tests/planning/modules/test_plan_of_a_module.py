"""Claim: of a module's step the largest part is named with its numbers, a technique that cannot help is named with the
reason, the fastest plan that fits is taken and counted once more, and what is missing is said where none fits.
"""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.costs.model_shape import ModelShape, profile_of_module
from lightning_amp.costs.profiled_step import WEIGHT_BYTES, Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError, ModelError, NoRoomToCountError, PlanError
from lightning_amp.footprint.chain.chain import RECOMPUTED, BlockCost, Chain, ChainMoment
from lightning_amp.footprint.module_profile import KINDS, PARTS, ModuleBytes, ModuleProfile, TensorBytes
from lightning_amp.footprint.module_profile import Moment as Stretch
from lightning_amp.lightning.steps.out_of_memory import advice_on_memory
from lightning_amp.planning.modules import candidates
from lightning_amp.planning.modules.candidates import compare
from lightning_amp.planning.modules.min_memory_plan import fewest_ranks
from lightning_amp.planning.modules.plan_module import diagnose_module, plan_again, plan_module, split_by_planner
from lightning_amp.planning.plan.plan import Plan, Validation
from lightning_amp.planning.policies.make_plan import plan as make_plan
from lightning_amp.planning.reports.plan_report import plan_report, plan_summary, shortfall
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterShape, ParameterUnit
from lightning_amp.techniques.recompute.row import RecomputeBlock
from lightning_amp.techniques.table import PREDICTIONS
from tests.planning.modules.facts import with_units

BLOCKS, SAVED = 4, 1000
NAMES = tuple(f"blocks.{k}" for k in range(BLOCKS))


def chain(n: int = BLOCKS, *, fixed: int = 0, work: int = 50, rest: int = 200) -> Chain:
    """Blocks that keep SAVED bytes each, and `rest` that is alive whatever they keep."""
    blocks = tuple(
        BlockCost(
            fqn=f"blocks.{k}",
            forward_seconds=1.0,
            saved_bytes=SAVED,
            fixed="it changes its argument 0 in place" if k < fixed else "",
        )
        for k in range(n)
    )
    moments = [ChainMoment(n_bytes=rest, after=n)]
    moments += [ChainMoment(n_bytes=rest + work + SAVED, after=k, block=k, form=RECOMPUTED) for k in range(n)]
    return Chain(blocks=blocks, moments=tuple(moments), seconds=12.0)


def profiled(*, held: int = 100, saved: int = BLOCKS * SAVED + 100, **more: Any) -> ModuleProfile:
    """The profile of a step with so many bytes held and saved."""
    third = held // 4
    by_kind = dict.fromkeys(KINDS, 0) | {"parameters": held - 3 * third, "gradients": third}
    by_kind |= {"optimiser state": 2 * third, "activations": saved}
    parts = dict.fromkeys(PARTS, 0) | {"parameters": held, "saved": saved}
    rows = [ModuleBytes(fqn=f"blocks.{k}", n_bytes=SAVED, by_kind=dict.fromkeys(KINDS, 0)) for k in range(3)]
    tensor = TensorBytes(name="gelu", fqn="blocks.0", kind="activations", shape=(5, 50), dtype="float32", n_bytes=SAVED)
    # of the activations the batch is left
    late = by_kind | {"activations": min(saved, 100)}
    values = {
        "peak_bytes": held + saved,
        "largest": max(parts, key=parts.__getitem__),
        "parts": parts,
        "by_kind": by_kind,
        "peak_phase": "backward",
        "peak_module": "blocks.3",
        "modules": tuple(rows),
        "tensors": (tensor,),
        "timeline": tuple(
            Stretch(phase=phase, fqn=fqn, by_kind=kinds)
            for phase, names, kinds in (
                ("forward", NAMES, by_kind),
                ("backward", NAMES[::-1], by_kind),
                ("optimiser", ("",), late),
            )
            for fqn in names
        ),
        "measured": "fake tensors",
        "batch_size": 8,
    }
    return ModuleProfile(**{**values, **more})  # type: ignore[arg-type]


def seen(profile: ModuleProfile | None = None, blocks: Chain | None = None, weights: int = 25) -> ProfiledStep:
    shape = ParameterShape(name="weight", shape=(weights // BLOCKS,), item_bytes=1)
    profile = profile or profiled()
    step = ProfiledStep(
        profile=profile, chain=blocks or chain(rest=profile.peak_bytes - BLOCKS * SAVED), rates=CPU_CORE
    )
    units = (*(ParameterUnit(fqn=fqn, parameters=(shape,)) for fqn in NAMES), ParameterUnit(fqn="", parameters=()))
    return with_units(step, units)


def base(budget: int | None, *, devices: int = 1, **options: Any) -> Plan:
    shape = ModelShape(batch_size=8, parameter_bytes=25, base_activation_bytes=0, profiled=True)
    return make_plan(
        profile_of_module(shape), devices=devices, device_memory=budget, shape=shape, batch_size=8, **options
    )


def test_the_largest_part_is_a_signal_with_its_numbers() -> None:
    found = plan_module(base(10_000), seen())
    assert found.signals == ("MANY_SAVED_TENSORS",)
    (said,) = (text for text in found.evidence if text.startswith("MANY_SAVED_TENSORS"))
    assert "4.00 KiB, 98 % of the peak" in said
    assert "(the largest part)" in said
    assert found.diagnosis.largest == "saved"
    assert "the largest tensor is gelu of blocks.0, [5, 50] float32: 0.98 KiB, 24 % of the peak" in (
        found.diagnosis.evidence
    )


def test_what_takes_many_times_as_long_is_listed_last() -> None:
    """Of a step of microseconds, the messages of fsdp take most of the time, though it saves more than recompute."""
    profile = profiled(held=9000, saved=4100)
    found = chain(rest=profile.peak_bytes - BLOCKS * SAVED)
    quick = replace(found, blocks=tuple(replace(one, forward_seconds=1e-6) for one in found.blocks), seconds=1e-5)
    helps = diagnose_module(seen(profile, quick, weights=2250)).helps
    assert list(helps) == ["recompute", "fsdp"]
    assert "% more time" in helps["recompute"]
    assert re.search(r"for about \d+ times the time", helps["fsdp"])


def test_what_cannot_help_is_named_with_the_reason() -> None:
    saved, held = (diagnose_module(seen()), diagnose_module(seen(profiled(held=90_000, saved=4100), weights=22_500)))
    assert list(saved.helps) == ["recompute"]
    assert saved.does_not_help["fsdp"].startswith("fsdp would not: 98 % of the peak are activations and temporaries")
    assert held.largest == "parameters"
    assert list(held.helps) == ["fsdp"]
    assert (
        held.does_not_help["recompute"].startswith(
            "recompute would not: 96 % of the peak are optimiser state, gradients and parameters"
        )
        or "96 % of the peak are optimiser state, parameters and gradients" in held.does_not_help["recompute"]
    )
    stuck = diagnose_module(seen(blocks=chain(fixed=BLOCKS)))
    assert "of blocks.0 to blocks.3 it changes its argument 0 in place" in stuck.does_not_help["recompute"]
    alone = diagnose_module(seen(blocks=chain(0)))
    assert "the step calls no child of a list" in alone.does_not_help["recompute"]
    wide = chain(work=5 * SAVED)
    assert (
        "for the blocks keep little except their inputs"
        in (diagnose_module(seen(blocks=wide)).does_not_help["recompute"])
    )


@pytest.mark.parametrize(
    ("budget", "strategies", "blocks"),
    [(None, (), 0), (4200, (), 0), (4199, ("recompute",), 1), (3199, ("recompute",), 2)],
)
def test_the_fastest_plan_that_fits_is_taken(budget: int | None, strategies: Any, blocks: int) -> None:
    found = plan_module(base(budget), seen())
    assert found.strategies == strategies
    assert len(found.rules) == blocks
    assert all(rule.spec == RecomputeBlock() for rule in found.rules)
    assert all(rule.saves_bytes == SAVED and rule.why for rule in found.rules)
    assert found.fits is (None if budget is None else True)
    assert found.candidates[0].strategies == strategies
    assert found.candidates[0].peak_bytes == found.predicted_peak_bytes
    assert found.predicted_step_seconds == pytest.approx(12.0 + blocks)
    assert Plan.from_json(found.to_json()) == found


def test_a_choice_is_counted_and_made_leaner_where_it_does_not_fit() -> None:
    counted: list[int] = []

    def count(rules: Any) -> ModuleProfile:
        counted.append(len(rules))
        return profiled(saved=BLOCKS * SAVED + 100 - (len(rules) - 1) * SAVED)

    found = plan_module(base(3300), seen(), count=count)
    assert counted == [1, 2]
    assert found.predicted_peak_bytes == 3200
    assert found.fits
    assert found.candidates[0].peak_bytes == 3200
    exact = plan_module(base(3300), seen(), count=lambda rules: profiled(saved=3100))
    assert (len(exact.rules), exact.predicted_peak_bytes) == (1, 3200)


def test_a_prediction_that_was_too_low_rules_out_no_other_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are predicted to fit and to be fast, and are counted far above the budget."""

    def chunked(step: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
        if draft.targets:
            return "it is alone"
        target = Rule(strategy="chunk", fqn="blocks.0", spec=ChunkBlock(budget_bytes=9), why="")
        return replace(draft, peak_bytes=3300, seconds=draft.seconds, targets=(target,))

    def count(rules: Any) -> ModuleProfile:
        again = [rule for rule in rules if rule.strategy == "recompute"]
        return profiled(saved=BLOCKS * SAVED + 100 - len(again) * SAVED)

    monkeypatch.setitem(PREDICTIONS, "chunk", replace(PREDICTIONS["chunk"], add=chunked))
    found = plan_module(base(3300), seen(), count=count)
    assert (found.strategies, len(found.rules), found.predicted_peak_bytes) == (("recompute",), 1, 3200)
    by_name = {row.strategies: row for row in found.candidates}
    assert by_name["chunk",].peak_bytes == 4200
    assert by_name["chunk",].verdict.startswith("exceeds")


def test_beside_logits_as_few_blocks_run_again_as_must() -> None:
    """Logits take 2000 bytes, in the head and at every moment of the blocks."""
    without = replace(chain(), seconds=12.5)
    step = replace(seen(blocks=chain(rest=2200)), profile=profiled(saved=BLOCKS * SAVED + 2100))
    counted = SimpleNamespace(profile=profiled(), chain=without)
    step = replace(step, counted=lambda rule: counted)
    found = plan_module(base(3300), step)
    assert found.strategies == ("recompute", "logits")
    assert [rule.strategy for rule in found.rules] == ["recompute", "logits"]
    assert found.predicted_peak_bytes == 3200
    assert found.predicted_step_seconds == pytest.approx(13.5)


def test_at_last_all_that_can_be_is_done_and_what_was_counted_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that is just above the budget whatever is tried."""
    monkeypatch.setattr(candidates, "TRIES", 2)
    counted: list[int] = []

    def count(rules: Any) -> ModuleProfile:
        counted.append(len(rules))
        return profiled(saved=3201)

    found = plan_module(base(3300), seen(), count=count)
    # all blocks are not counted: with what the counts take beyond the predictions, they are to need no less
    assert counted == [1, BLOCKS - 1, BLOCKS - 1]
    assert not found.fits
    assert found.predicted_peak_bytes == 3301
    assert any("requires at least 3.22 KiB with recompute" in note for note in found.notes)


def test_where_nothing_fits_the_least_is_that_of_counts() -> None:
    """Recomputation is predicted to be the leanest, and counted to take more than the step as it is."""
    found = plan_module(base(1000), seen(), count=lambda rules: profiled(saved=6000))
    assert (found.strategies, found.predicted_peak_bytes, found.fits) == ((), 4200, False)
    assert any("requires at least 4.10 KiB on 1 rank" in note for note in found.notes)
    assert {row.strategies: row.peak_bytes for row in found.candidates}["recompute",] >= 6000


def test_a_module_that_refuses_a_technique_is_planned_without() -> None:
    def count(rules: Any) -> ModuleProfile:
        raise InstallError("its forward was set by other code")

    found = plan_module(base(3300), seen(), count=count)
    assert found.strategies == ()
    assert found.fits is False
    assert "recompute" not in found.diagnosis.helps
    assert found.diagnosis.does_not_help["recompute"] == "recompute would not: its forward was set by other code"
    assert "recompute" not in "".join(advice_on_memory(found, torch.device("cpu")))
    with pytest.raises(InstallError, match="other code"):
        plan_module(base(3300), seen(), named=("recompute",), count=count)


def test_the_least_leaves_out_what_had_no_room_to_be_counted() -> None:
    def count(rules: Any) -> ModuleProfile:
        raise NoRoomToCountError("it was run with values")

    found = plan_module(base(3300), seen(), count=count)
    (said,) = (note for note in found.notes if note.startswith("the step requires at least"))
    assert "of the plans that were counted: with recompute the step, which needs values, has no room" in said


def test_refusals_are_no_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two techniques that are refused together, each is tried by itself, and the one that is none is kept."""
    monkeypatch.setattr(candidates, "TRIES", 1)
    counted = []

    def count(rules: Any) -> ModuleProfile:
        counted.append(sorted({rule.strategy for rule in rules}))
        if "chunk" in counted[-1]:
            raise ModelError("the step fails") from InstallError("blocks.1 changes a buffer")
        return profiled(saved=100)

    def chunked(step: ProfiledStep, draft: Draft, budget: int | None) -> Draft:
        spec = ChunkBlock(budget_bytes=9)
        targets = (*draft.targets, Rule(strategy="chunk", fqn="blocks.0", spec=spec, why=""))
        return replace(draft, peak_bytes=draft.peak_bytes // 2, seconds=draft.seconds / 2, targets=targets)

    monkeypatch.setitem(PREDICTIONS, "chunk", replace(PREDICTIONS["chunk"], add=chunked))
    found = plan_module(base(1500), seen(), count=count)
    assert counted[0] == ["chunk", "recompute"]
    assert counted[-1] == ["recompute"]
    assert found.strategies == ("recompute",)
    assert found.diagnosis.does_not_help["chunk"] == "chunk would not: blocks.1 changes a buffer"
    assert not any("chunk" in row.strategies for row in found.candidates)


def test_what_is_asked_for_by_name_is_honoured() -> None:
    asked = plan_module(base(10_000, strategies="S1"), seen(), named=("recompute",), budget_named=False)
    assert asked.strategies == ("S1", "recompute")
    assert [rule.fqn for rule in asked.rules] == ["", *(f"blocks.{k}" for k in range(BLOCKS))]
    assert all(rule.why.startswith("requested by the user") for rule in asked.rules[1:])
    least = plan_module(base(3300, strategies="S1"), seen(), named=("recompute",))
    assert len(least.rules) == 2
    with pytest.raises(PlanError, match="fsdp needs 2 ranks of the data axis, and there is 1"):
        plan_module(base(None), seen(), named=("fsdp",))
    with pytest.raises(PlanError, match="recompute is not possible: the step calls no child of a list"):
        plan_module(base(None), seen(blocks=chain(0)), named=("recompute",))
    assert split_by_planner("S1,fsdp,recompute", policy="auto") == (["S1"], ("recompute", "fsdp"))
    assert split_by_planner(None, policy="auto") == (None, None)
    assert split_by_planner(None, policy="paper") == (None, ())
    paper = plan_module(base(3300), seen(), named=())
    assert paper.strategies == ()
    assert paper.diagnosis is not None


def test_what_is_missing_is_said() -> None:
    heavy = seen(profiled(held=8000), weights=2000)
    found = plan_module(base(7000), heavy)
    assert found.fits is False
    text = shortfall(found)
    assert "the step requires at least" in text
    more = fewest_ranks(heavy, 7000)
    assert more.ranks > 1
    assert f"{more.ranks} ranks with {' and '.join(more.strategies)} would fit" in text
    assert text in plan_report(found).replace("\n  ", " ")
    assert shortfall(plan_module(base(10), heavy)).endswith("on 1 rank, as far as techniques were looked for")
    heavy = replace(heavy, counted=lambda rule: "it has no cross-entropy")
    held = "alone take 7.81 KiB, whatever the batch: use a smaller model"
    several = ", or a smaller batch on several ranks that split them, with strategies='fsdp' or 'tensor3d'"
    hopeless = shortfall(plan_module(base(10), heavy))
    assert "no number of ranks up to 1024 would be enough: parameters, gradients and optimizer state" in hopeless
    assert hopeless.endswith(held + several)
    one = replace(heavy, profile=replace(heavy.profile, batch_size=1))
    assert shortfall(plan_module(base(10), one)).endswith(held)


def test_a_step_below_the_validation_is_no_plan_of_less_memory() -> None:
    plan = replace(plan_module(base(None), seen(blocks=chain(fixed=BLOCKS))), diagnosis=None)
    peak = plan.predicted_peak_bytes
    validation = Validation(peak_bytes=2 * peak, training_bytes=peak, batch_size=4)
    larger = replace(plan, predicted_peak_bytes=2 * peak, validation=validation)
    assert min(one.peak_bytes for one in plan.candidates) == peak
    assert "less memory     none of the techniques that were compared" in plan_summary(larger)


def test_a_smaller_batch_is_advised_where_it_helps() -> None:
    # the activations of one block exceed the budget, which parameters fit
    large = replace(seen(), counted=lambda rule: "it has no cross-entropy")
    budget = large.held_bytes + 1
    said = shortfall(plan_module(base(budget), large))
    assert "no number of ranks up to 1024 would be enough: use a smaller batch, or split" in said
    one = replace(large, profile=replace(large.profile, batch_size=1))
    said = shortfall(plan_module(base(budget), one))
    assert "enough: split a sample over several ranks with strategies='sequence' or 'tensor3d'" in said


def test_a_batch_without_a_length_is_said_to_count_as_one_sample() -> None:
    said = "all of it counts as one sample"
    assert said not in plan_report(plan_module(base(10_000), seen()))
    made = plan_module(base(10_000), seen(profiled(batch_size=None)))
    assert said in " ".join(plan_report(made).split())
    assert [said in note for note in plan_again(made, seen(profiled(batch_size=None))).notes].count(True) == 1


def test_a_given_plan_that_does_not_fit_says_what_it_was_counted_to_need() -> None:
    """What is missing was that of the prediction, which a plan can be counted to exceed, and less than its budget."""
    step = seen()
    whole = plan_module(base(None, strategies="S1"), step, named=("recompute",), budget_named=False)
    again = plan_again(replace(whole, budget_bytes=1800), step, count=lambda rules: profiled(saved=1900))
    assert (again.predicted_peak_bytes, again.fits) == (2000, False)
    assert "the step requires at least 1.95 KiB with recompute on 1 rank" in shortfall(again)


def test_no_technique_for_blocks_makes_less_of_what_averaging_takes() -> None:
    small = ParameterShape(name="bias", shape=(9000,), item_bytes=1)
    step = with_units(seen(profiled(held=8000)), (ParameterUnit(fqn="", parameters=(small,)),))
    averaged = 8000 + 100 + 9000 + WEIGHT_BYTES
    assert step.peak_bytes(2) == averaged > step.peak_bytes(1) + WEIGHT_BYTES
    peaks = {row.strategies: row.peak_bytes for row in compare(step, ranks=2, budget=None).candidates}
    assert peaks["recompute",] == averaged
    assert "recompute" in diagnose_module(step, ranks=2).does_not_help
