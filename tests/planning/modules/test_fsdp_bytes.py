"""Claim: a plan with fsdp is refused where it would split nothing or was not tested; its bytes follow from shapes."""

from dataclasses import replace

import pytest

from lightning_amp.costs.model_shape import DecoderShape, ModelShape, profile_of_module, shape_of_decoder
from lightning_amp.errors import PlanError
from lightning_amp.footprint.module_profile import KINDS, ModuleProfile, Moment, TensorBytes
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterShape, ParameterUnit, fsdp_peak_bytes
from lightning_amp.techniques.fsdp.row import FullyShard

SHAPE = ModelShape(batch_size=4, parameter_bytes=1000, base_activation_bytes=0, blocks=("net.0", "net.2"))


def test_a_plan_names_the_units_and_the_root() -> None:
    made = plan(profile_of_module(SHAPE), devices=4, strategies="fsdp", shape=SHAPE)
    assert made.strategies == ("S1", "fsdp")
    assert (made.mesh.data, made.mesh.model) == (4, 1)
    assert [rule.fqn for rule in made.rules if rule.spec == FullyShard()] == ["net.0", "net.2", ""]
    assert Plan.from_json(made.to_json()) == made


def test_one_device_is_refused() -> None:
    with pytest.raises(PlanError, match="over which it splits parameters, found one: devices=1, of which"):
        plan(profile_of_module(SHAPE), devices=1, strategies="fsdp", shape=SHAPE)


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


def test_a_number_of_the_optimiser_s_state_is_whole_on_every_rank() -> None:
    step = moment("optimiser", "", 400, 400, 804, 5000, 0)
    taken = TensorBytes(name="w.step", fqn="", kind="optimiser state", shape=(), dtype="float32", n_bytes=4)
    found = fsdp_peak_bytes(replace(profile(step), tensors=(taken,)), (unit("", 400),), 2)
    assert found == 200 + 200 + 400 + 4 + 5000


def test_the_backward_pass_has_what_is_sent_and_what_is_received() -> None:
    units = (unit("a", 400), unit("b", 400), unit("", 100, trained=False))
    forward = [moment("forward", fqn, 900, 0, 0, 0, 0) for fqn in ("a", "b")]
    backward = [moment("backward", "b", 900, 400, 0, 70, 0), moment("backward", "a", 900, 800, 0, 0, 0)]
    assert fsdp_peak_bytes(profile(*forward), units, 2) == 450 + 100 + 400 + 2 * 400
    working = 450 + 100 + 200 + 400 + 400 + 400
    found = fsdp_peak_bytes(profile(*forward, *backward), units, 2)
    sending = 450 + 70 + 100 + 400 + 2 * 400 + 200
    assert found == max(working, sending) == sending
