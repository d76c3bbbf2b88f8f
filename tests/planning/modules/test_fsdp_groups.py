"""Claim: fsdp, in groups or with rows in the host's memory, is planned by its bytes, which follow from shapes, and its
time."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_amp.costs.device_rates import CPU_CORE, rates_for
from lightning_amp.costs.model_shape import DecoderShape, ModelShape, profile_of_module
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.errors import PlanError
from lightning_amp.footprint.module_profile import KINDS, ModuleProfile, Moment, TensorBytes
from lightning_amp.planning.base.rules import remarks, with_requested
from lightning_amp.planning.modules.candidates import draft
from lightning_amp.planning.modules.plan_module import plan_again, plan_module
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterShape, ParameterUnit, fsdp_host_bytes, fsdp_peak_bytes
from lightning_amp.techniques.fsdp.row import (
    HANDLING_S,
    MESSAGES,
    ON_HOST,
    PASSES,
    FullyShard,
    fsdp_seconds,
    units_in,
    variants,
)
from tests.planning.modules.facts import with_units
from tests.planning.modules.test_plan_of_a_module import NAMES, base, chain, profiled, seen
from tests.planning.profiles import shape_of_decoder

NET = ModelShape(batch_size=4, parameter_bytes=1000, base_activation_bytes=0, blocks=("net.0", "net.2"))


def test_a_plan_names_the_units_and_the_root() -> None:
    made = plan(profile_of_module(NET), devices=4, strategies="fsdp", shape=NET)
    assert made.strategies == ("S1", "fsdp")
    assert (made.mesh.data, made.mesh.model) == (4, 1)
    assert [rule.fqn for rule in made.rules if rule.spec == FullyShard()] == ["net.0", "net.2", ""]
    assert Plan.from_json(made.to_json()) == made


def test_one_device_is_refused_but_with_rows_on_the_host() -> None:
    made = plan(profile_of_module(NET), devices=1, strategies="fsdp", shape=NET)
    with pytest.raises(PlanError, match="fsdp needs 2 ranks of the data axis, and there is 1; use more devices"):
        with_requested(made, {"fsdp": FullyShard()}, NET)
    on_host = with_requested(made, {"fsdp": FullyShard(offload=True)}, NET, launches=True)
    assert {rule.spec for rule in on_host.rules if rule.strategy == "fsdp"} == {FullyShard(offload=True)}
    with_bound = FullyShard(host_memory=5)
    assert any("bounds nothing of fsdp" in note for note in remarks({"fsdp": with_bound}, launches=True))


@pytest.mark.parametrize(("beside", "model"), [("", 1), (",S2", 2), (",stream", 1), (",nodes", 2)])
def test_a_decomposed_decoder_is_refused(beside: str, model: int) -> None:
    decoder = DecoderShape(
        fqn="decoder", anchors=40, dim=8, features=(9, 9), distances=(0, 1), attention=True, window=4
    )
    shape = replace(shape_of_decoder(decoder, batch_size=4), blocks=("decoder.strata.0",))
    with pytest.raises(PlanError, match="the strata of a decomposed decoder|a decomposed decoder's strata"):
        plan(profile_of_module(shape), devices=4, strategies=f"fsdp{beside}", shape=shape, model_parallel_size=model)


def moment(phase: str, fqn: str, *n_bytes: int) -> Moment:
    return Moment(phase=phase, fqn=fqn, by_kind=dict(zip(KINDS, n_bytes, strict=True)))


def profile(*timeline: Moment) -> ModuleProfile:
    return ModuleProfile(
        peak_bytes=0,
        largest="parameters",
        parts={},
        by_kind={},
        peak_phase="forward",
        peak_module="",
        modules=(),
        tensors=(),
        timeline=timeline,
        measured="by hand",
    )


def unit(fqn: str, rows: int, *, trained: bool = True) -> ParameterUnit:
    name = f"{fqn}.weight" if fqn else "weight"
    return ParameterUnit(fqn=fqn, parameters=(ParameterShape(name=name, shape=(rows,), item_bytes=1, trained=trained),))


def test_the_forward_pass_has_three_of_a_unit_and_the_optimiser_rows() -> None:
    units = (unit("a", 400), unit("b", 400), unit("", 100))
    # 10 bytes are of buffers
    held = (910, 900, 1800)
    steps = [moment("forward", "a", *held, 0, 0), moment("forward", "b.0", *held, 50, 0)]
    rows = 450 + 10 + 900
    found = fsdp_peak_bytes(profile(*steps), units, 2)
    assert found == rows + 450 + 50 + 100 + 400 + 2 * 400, "rows, gradients, activations, root, a's and twice b's"
    step = moment("optimiser", "", *held, 0, 9000)
    assert fsdp_peak_bytes(profile(*steps, step), units, 2) == rows + 450 + 9000 // 2
    # a number of the optimiser s state is whole on every rank
    step = moment("optimiser", "", 400, 400, 804, 5000, 0)
    taken = TensorBytes(name="w.step", fqn="", kind="optimiser state", shape=(), dtype="float32", n_bytes=4)
    found = fsdp_peak_bytes(replace(profile(step), tensors=(taken,)), (unit("", 400),), 2)
    assert found == 200 + 200 + 400 + 4 + 5000
    # rows in the hosts memory are not on the device
    units = (unit("a", 400), unit("b", 400), unit("", 100))
    held = (910, 900, 1800)
    forward = [moment("forward", "a", *held, 0, 0), moment("forward", "b", *held, 50, 0)]
    # buffers, activations, the root, what a has received, b twice, and b's rows on their way
    found = fsdp_peak_bytes(profile(*forward), units, 2, offload=True)
    assert found == 10 + 50 + 100 + 400 + 2 * 400 + 200
    optimiser = moment("optimiser", "", *held, 0, 9000)
    assert fsdp_peak_bytes(profile(*forward, optimiser), units, 2, offload=True) == found
    backward = [moment("backward", "b", 910, 400, 1800, 70, 0), moment("backward", "a", 910, 800, 1800, 0, 0)]
    sending = 10 + 70 + 100 + 400 + 2 * 400 + 200
    assert fsdp_peak_bytes(profile(*forward, *backward), units, 2, offload=True) == sending
    alone = (unit("", 100),)
    assert fsdp_peak_bytes(profile(moment("forward", "", 100, 0, 0, 0, 0)), alone, 2, offload=True) == 250
    # one rank has no buffers of received parameters, and copies one parameter after the other
    two = ParameterUnit(fqn="b", parameters=tuple(p for n in (300, 100) for p in unit("b", n).parameters))
    one = (unit("a", 400), two, unit("", 100))
    assert fsdp_peak_bytes(profile(*forward), one, 1, offload=True) == 10 + 100 + 2 * 400
    # a and its gradients, and those that b has sent
    assert fsdp_peak_bytes(profile(*forward, *backward), one, 1, offload=True) == 10 + 100 + 3 * 400
    assert fsdp_host_bytes(profile(*forward, optimiser), one, 1) == 3600
    # rows of parameters and gradients in page-locked memory, of which torch takes powers of two; state is in other
    assert fsdp_host_bytes(profile(*forward, optimiser), one, 1, pinned=True) == 2 * (512 + 512 + 128 + 128) + 1800
    frozen = (unit("a", 400, trained=False), unit("", 500))
    assert fsdp_host_bytes(profile(*forward, optimiser), frozen, 2, pinned=True) == 256 + 2 * 256 + 900


def test_the_backward_pass_has_what_is_sent_and_what_is_received() -> None:
    units = (unit("a", 400), unit("b", 400), unit("", 100, trained=False))
    forward = [moment("forward", fqn, 900, 0, 0, 0, 0) for fqn in ("a", "b")]
    backward = [moment("backward", "b", 900, 400, 0, 70, 0), moment("backward", "a", 900, 800, 0, 0, 0)]
    assert fsdp_peak_bytes(profile(*forward), units, 2) == 450 + 100 + 400 + 2 * 400
    working = 450 + 100 + 200 + 400 + 400 + 400
    found = fsdp_peak_bytes(profile(*forward, *backward), units, 2)
    sending = 450 + 70 + 100 + 400 + 2 * 400 + 200
    assert found == max(working, sending) == sending


GIB = 2**30
A100 = rates_for("A100").on_nodes_of(8)
SHAPE = ModelShape(batch_size=8, parameter_bytes=25, base_activation_bytes=0, profiled=True)


def heavy(fsdp: FullyShard | None = None, rates: Any = A100, *, seconds: float = 0.01) -> ProfiledStep:
    """A step that holds 4 GiB, of which 1 GiB are parameters, and computes little."""
    shape = ParameterShape(name="weight", shape=(GIB // len(NAMES),), item_bytes=1)
    units = (*(ParameterUnit(fqn=fqn, parameters=(shape,)) for fqn in NAMES), ParameterUnit(fqn="", parameters=()))
    step = seen(profiled(held=4 * GIB), replace(chain(rest=4 * GIB), seconds=seconds))
    return replace(with_units(step, units, fsdp), rates=rates)


def seconds_of(step: ProfiledStep, spec: FullyShard, ranks: int) -> float:
    return fsdp_seconds(step, units_in(step), spec, ranks)


def ways_to_split(step: ProfiledStep, ranks: int) -> list[Any]:
    return [one.requested["fsdp"] for one in variants(step, ranks)]


def made(step: ProfiledStep, ranks: int, budget: int | None) -> Draft:
    found = draft(step, ("fsdp",), ranks=ranks, budget=budget)
    assert isinstance(found, Draft)
    return found


def split_by(plan: Plan) -> set[Any]:
    return {rule.spec for rule in plan.rules if rule.strategy == "fsdp"}


def split_of(one: Draft) -> Any:
    (spec,) = {target.spec for target in one.targets}
    return spec


def test_groups_send_rows_between_nodes_and_the_rest_within_one() -> None:
    inside, between = 300e9, 8 * 25e9
    latency = len(NAMES) * 1e-5  # of every unit
    expected = 2 * 7 * (GIB / 8 / inside + latency) + 7 * (GIB / 8 / inside + latency)
    # eight rings of two ranks cross the link between the nodes at once
    expected += 2 * (GIB / 8 / 2 / (between / 8) + latency)
    expected -= 30 * (GIB / 16 / between + 1e-5)
    # of nodes whose one adapter has all of the bandwidth
    step = heavy(rates=replace(A100, links=replace(A100.links, adapters=1)))
    assert seconds_of(step, FullyShard(shard_ranks=8), 16) == pytest.approx(expected)
    over_all = seconds_of(step, FullyShard(), 16)
    assert over_all == pytest.approx(45 * (GIB / 16 / between + latency) - 30 * (GIB / 16 / between + 1e-5))
    assert expected < over_all, "links inside of a node are faster"
    assert seconds_of(step, FullyShard(shard_ranks=16), 16) == over_all
    # of eight adapters a ring of all ranks has one, and the eight rings of the groups have them all
    assert seconds_of(heavy(), FullyShard(shard_ranks=8), 16) == 0.0
    # on a cpu every message is handled by the core that computes
    free = replace(CPU_CORE, launches=True)
    here, away = (seconds_of(heavy(rates=rates), FullyShard(), 2) for rates in (CPU_CORE, free))
    assert here - away == pytest.approx(len(NAMES) * MESSAGES * HANDLING_S)


def test_on_several_nodes_the_policy_splits_within_one_where_that_fits() -> None:
    assert ways_to_split(heavy(), 16) == [FullyShard(), FullyShard(shard_ranks=8)]
    for ranks in (8, 12):
        assert ways_to_split(heavy(), ranks) == [FullyShard()], "one node, or no whole number of them"
    assert ways_to_split(heavy(FullyShard(offload=True)), 16) == [FullyShard(offload=True)]
    group, over_all = made(heavy(), 16, 3 * GIB), made(heavy(), 16, None)
    assert split_of(group) == FullyShard(shard_ranks=8)
    assert split_of(over_all) == FullyShard(), "where nothing is asked for, all that can be had"
    assert over_all.peak_bytes < group.peak_bytes < 3 * GIB
    assert group.seconds < over_all.seconds
    tight = made(heavy(), 16, (over_all.peak_bytes + group.peak_bytes) // 2)
    assert split_of(tight) == FullyShard()
    slow = made(heavy(seconds=60.0), 16, 3 * GIB)
    assert split_of(slow) == FullyShard(), "as fast, and less memory"
    assert group.targets[-1].why.endswith("are split over 8 ranks, the same in each of 2 groups")


def test_a_plan_keeps_its_groups_and_is_predicted_with_them() -> None:
    step, given = heavy(), base(3 * GIB, devices=16)
    found = plan_module(given, step)
    assert found.strategies == ("S1", "fsdp")
    assert split_by(found) == {FullyShard(shard_ranks=8)}
    assert Plan.from_json(found.to_json()) == found
    again = plan_again(found, step)
    assert again.rules == found.rules
    assert again.predicted_peak_bytes == found.predicted_peak_bytes
    asked = plan_module(given, heavy(FullyShard()), named=("fsdp",))
    assert split_by(asked) == {FullyShard()}
    assert asked.predicted_peak_bytes < found.predicted_peak_bytes
    # a plan file of before has no groups
    plan = plan_module(base(None, devices=4), heavy(FullyShard()), named=("fsdp",))
    before = plan.to_json().replace('"offload": false,', '"offload": false').replace('"shard_ranks": null', "")
    assert Plan.from_json(before) == plan


def test_one_gpu_keeps_on_the_host_what_does_not_fit() -> None:
    step = heavy()
    assert ways_to_split(step, 1) == [FullyShard(offload=True)]
    found = made(step, 1, None)
    spec = split_of(found)
    assert (spec.offload, spec.host_memory) == (True, None)
    # parameters, gradients and optimiser state
    assert spec.host_bytes == 4 * GIB
    assert found.peak_bytes < 1.01 * GIB
    assert "on the device where they are used, and lie in the host's memory, 4.00 GiB" in found.targets[0].why
    assert made(replace(step, host_memory=4 * GIB), 1, None).targets[0].spec.host_memory == 4 * GIB  # type: ignore[attr-defined]
    less = draft(replace(step, host_memory=4 * GIB - 1), ("fsdp",), ranks=1, budget=None)
    assert less == (
        "fsdp is not possible: a rank's share of them takes 4.00 GiB of host memory, and host_memory is 4.00 GiB"
    )
    # a CPU's memory is the host's
    assert draft(heavy(rates=CPU_CORE), ("fsdp",), ranks=1, budget=None) == (
        "fsdp needs 2 ranks of the data axis, and there is 1"
    )
    both = draft(step, ("fsdp", "host_optimizer"), ranks=1, budget=None)
    assert both == "host_optimizer is not possible: fsdp_offload keeps the optimizer's state on the host already"


def test_rows_in_the_hosts_memory_take_its_link_and_its_processor() -> None:
    asked = FullyShard(offload=True)
    more = seconds_of(heavy(), asked, 4) - seconds_of(heavy(), FullyShard(), 4)
    assert more == pytest.approx(3 * GIB / 4 / A100.host_bandwidth + PASSES * 4 * GIB / 4 / A100.host.memory)
    away, here = made(heavy(asked), 4, None), made(heavy(FullyShard()), 4, None)
    assert away.peak_bytes < here.peak_bytes - 4 * GIB // 4 + GIB // 4
    assert "lie in the host's memory" in away.targets[0].why
    # on a cpu rows are in the hosts memory anyway
    away, here = (made(heavy(spec, CPU_CORE), 4, None) for spec in (asked, FullyShard()))
    assert (away.peak_bytes, away.seconds) == (here.peak_bytes, here.seconds)
    plan = base(None, devices=4)
    assert with_requested(plan, {"fsdp": asked}, SHAPE).notes == (*plan.notes, ON_HOST)
    assert with_requested(plan, {"fsdp": asked}, SHAPE, launches=True) == plan
    assert with_requested(plan, {}, SHAPE) == plan
    assert remarks({"fsdp": asked}, launches=False) == [ON_HOST], "also of a plan that is given"
    assert remarks({"fsdp": FullyShard()}, launches=False) == []


@pytest.mark.parametrize(
    ("shard_ranks", "devices", "allowed"),
    [(3, 4, "found 4 ranks that average gradients"), (8, 4, "choose one of [2, 4]"), (2, 6, ""), (6, 6, "")],
)
def test_sizes_that_do_not_divide_are_refused(shard_ranks: int, devices: int, allowed: str) -> None:
    plan, asked = base(None, devices=devices, strategies="fsdp"), FullyShard(shard_ranks=shard_ranks)
    if not allowed:
        assert split_by(with_requested(plan, {"fsdp": asked}, SHAPE)) == {asked}
        return
    with pytest.raises(PlanError) as caught:
        with_requested(plan, {"fsdp": asked}, SHAPE)
    assert str(caught.value).startswith(f"fsdp_ranks={shard_ranks} is not supported, found {devices} ranks")
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"shard_ranks": null', '"shard_ranks": 3', "fsdp_ranks=3 is not supported, found 4 ranks"),
        ('"shard_ranks": null', '"shard_ranks": 1', "fsdp_ranks=1 is not supported, found 4 ranks"),
        ('"shard_ranks": null', '"shard_ranks": "2"', "fsdp_ranks='2' is not supported, found 4 ranks"),
        ('"offload": false', '"offload": 1', "offload=1 of fsdp is neither true nor false"),
    ],
)
def test_a_plan_file_that_cannot_be_is_refused(old: str, new: str, text: str) -> None:
    plain = plan_module(base(None, devices=4), heavy(FullyShard()), named=("fsdp",)).to_json()
    with pytest.raises(PlanError) as caught:
        Plan.from_json(plain.replace(old, new))
    assert text in str(caught.value)
    with pytest.raises(PlanError, match="rules of fsdp have the specs FullyShard"):
        Plan.from_json(plain.replace('"offload": false', '"offload": true', 1))
