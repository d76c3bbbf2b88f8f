"""Claim: the policy follows AMP's mapping, refuses what cannot run, and a plan survives JSON unchanged."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest

from lightning_amp.costs.model_shape import ModelShape, reference_shape
from lightning_amp.diagnosis import ATTENTION_DECODER, HEAVY_DECOMPOSITION, HIGH_INPUT_DIMENSIONALITY, SIGNALS
from lightning_amp.errors import PlanError
from lightning_amp.planning.base.rules import with_shared_statistics
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes, Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.reports.plan_report import plan_report, profile_report
from lightning_amp.quantities import parse_bytes
from lightning_amp.techniques.compile.row import CompileStrata
from lightning_amp.techniques.data.row import ShareBatchStatistics
from lightning_amp.techniques.hic.rows import StreamStrata
from lightning_amp.techniques.table import STRATEGIES
from tests.planning.profiles import hic, profile, rna, shape, with_full_attention

paper = partial(plan, batch_size=256, policy="paper")


def peak(strategies: str, devices: int) -> int:
    return plan(profile(), devices=devices, strategies=strategies, batch_size=256).predicted_peak_bytes


def test_one_device_is_single_device_execution_and_says_where_memory_ends() -> None:
    made = paper(profile(), devices=1, device_memory="1GiB")
    assert made.strategies == ()
    assert made.rules == ()
    assert made.fits is False
    assert made.fails_at_stratum is not None
    assert f"out of memory at stratum {made.fails_at_stratum}: " in plan_report(made)


def test_signals_activate_their_strategies_when_data_parallelism_does_not_fit() -> None:
    small = {"devices": 4, "device_memory": "10MiB"}
    no_ratio = paper(profile(hic(scale=2.0), rna()), **small)
    assert no_ratio.strategies == ("S1", "S3", "S5")
    assert no_ratio.mesh == MeshShape(data=1, model=4)
    assert paper(profile(hic(attention=False), rna()), **small).strategies == ("S1", "S2", "S4", "S5")


def test_each_rule_says_why_and_what_it_saves() -> None:
    made = plan(profile(), devices=2, strategies=["s3", "S4"], batch_size=256)
    assert made.strategies == ("S1", "S3", "S4")
    assert made.axes == Axes(attention="chunked", decode="key-first")
    by_strategy = {rule.strategy: rule for rule in made.rules if rule.strategy != "S1"}
    assert "ATTENTION_DECODER" in by_strategy["S3"].why
    assert by_strategy["S3"].fqn == "decoders.hic.strata.*.key.attention"
    assert by_strategy["S3"].saves_bytes == peak("S1,S4", 2) - made.predicted_peak_bytes > 0
    assert all(rule.why for rule in made.rules)


def test_cells_are_balanced_where_contacts_vary_and_not_on_one_rank() -> None:
    assert plan(profile(), devices=2, batch_size=32).balance_cells
    assert not plan(profile(), devices=2, batch_size=100_000).balance_cells
    assert not plan(profile(), devices=1, batch_size=32).balance_cells


def test_the_peak_is_written_as_the_sum_of_its_parts() -> None:
    for strategies in (None, "S1,S3", "S4,fused,sparse,stream", "S5"):
        made = plan(profile(), devices=2, device_memory="24GiB", batch_size=16, strategies=strategies)
        text = " ".join(plan_report(made).split())
        found = re.search(r"= (\S+ \S+) base \+ (\d+) strata x (\S+ \S+) \+ (\S+ \S+) of temporaries", text)
        assert found, text
        base, each, rest = (parse_bytes(found[i]) for i in (1, 3, 4))
        assert base + int(found[2]) * each + rest == pytest.approx(made.predicted_peak_bytes, rel=0.02)


def test_reports_fit_80_columns() -> None:
    made = paper(profile(), devices=4, device_memory="512MiB")
    text = profile_report(profile()) + "\n" + plan_report(made)
    assert max(map(len, text.splitlines())) <= 80
    assert "S5" in text
    assert "does NOT fit" in text


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"policy": "fast"}, "policy='fast' is not supported; allowed are 'auto', 'paper'"),
        ({"devices": 0}, "devices=0 is not supported; allowed is a whole number from 1 to 1,000,000"),
        ({"devices": "two"}, "devices='two'"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"device_memory": "24 apples"}, "'24 apples' is not a memory size; write a number of bytes"),
        ({"device_memory": "0GiB"}, "larger than zero, found '0GiB'"),
        ({"strategies": "S1,S9"}, r"\['S9'\] is not in the library; allowed are S1, S2, S3, S4, S5"),
        ({"strategies": ""}, "'nothing' is not in the library"),
        ({"model_parallel_size": "most"}, "model_parallel_size='most'"),
        ({"model_parallel_size": 3, "devices": 4, "strategies": "S5"}, r"must divide them, choose one of \[1, 2, 4\]"),
        ({"model_parallel_size": 2, "devices": 2, "strategies": "S1"}, "S1 split nothing over the model axis"),
        ({"strategies": "S5", "devices": 1}, "S5 split a module over the model axis"),
        ({"strategies": "pipeline", "devices": 4}, "they cannot be stages. Use 'strata'"),
    ],
)
def test_bad_requests_are_refused(request_, message) -> None:
    with pytest.raises(PlanError, match=message):
        plan(profile(), **request_)


def test_strategies_beyond_s1_need_the_decoder_they_change() -> None:
    with pytest.raises(PlanError, match="S3 change attention, but 'decoders.hic' builds its keys without attention"):
        plan(profile(hic(attention=False), rna()), devices=2, strategies="S3")
    with pytest.raises(PlanError, match="S4 requires a decoder of strata, and none was detected"):
        plan(profile(rna()), devices=2, strategies="S4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the plan is not JSON"),
        ("[]", r"has schema \[\]"),
        ('{"schema": 99}', "the plan has schema 99, and this version reads schema 2"),
        ('{"schema": 2}', "does not read as a plan"),
        ('{"schema": 2, "candidates": null}', "does not read as a plan"),
        ('{"schema": 2, "candidates": [1]}', "does not read as a plan"),
    ],
)
def test_plans_that_cannot_be_read(text, message) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def test_a_rule_of_unknown_type_and_a_missing_file(tmp_path) -> None:
    plain = json.loads(plan(profile(), devices=2).to_json())
    plain["rules"][0]["spec"]["type"] = "Teleport"
    with pytest.raises(PlanError, match="a rule of the plan has the type 'Teleport'; this version knows"):
        Plan.from_json(json.dumps(plain))
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.read(tmp_path / "absent.json")
    with pytest.raises(PlanError, match="a mesh of 0 x 2"):
        MeshShape(data=0, model=2)


EDITS = [
    (lambda p: p["rules"].pop(), r"strategies=\['S1', 'S3'\], but its rules are for \['S1'\]"),
    (lambda p: p["axes"].update(attention="eager"), "axes.attention='eager', with these strategies it is 'chunked'"),
    (lambda p: p["axes"].update(decode="bogus"), "axes.decode='bogus', with these strategies it is 'full'"),
    (lambda p: p["rules"][-1].update(spec={"type": "KeyFirstDecode"}), "S3 asks for KeyFirstDecode, which is S4"),
    (lambda p: p.update(balance_cells=not p["balance_cells"]), "and the rules say otherwise"),
    (lambda p: p.update(balance_cells="false"), "balance_cells='false' is neither true nor false"),
    (lambda p: p.update(predicted_peak_bytes="lots"), "predicted_peak_bytes='lots' is not a whole number"),
    (lambda p: p.update(batch_size=-1), "batch_size=-1 is not a whole number"),
    (lambda p: p.update(budget_bytes=float("nan")), "budget_bytes=nan is not a whole number"),
    (lambda p: p["rules"][-1].update(fqn=5), "fqn=5 is not text"),
    (lambda p: p.update(notes=[1]), "holds something other than text"),
    (lambda p: p["mesh"].update(data=2.0), "a mesh of 2.0 x 1 is not supported"),
    (lambda p: (p["strategies"].append("S7"), p["rules"][0].update(strategy="S7")), r"strategies=\['S7'\] are not of"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS)
def test_a_plan_that_contradicts_itself_is_refused(edit, message) -> None:
    plain = json.loads(plan(profile(), devices=2, strategies="S1,S3").to_json())
    edit(plain)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(plain))


def test_a_plan_of_a_model_without_batch_norm_shares_the_statistics_of_one_that_has_it() -> None:
    without = replace(shape(), batch_norms=False)
    of_other = plan(profile(), devices=2, strategies="S1", shape=without)
    assert not [rule for rule in of_other.rules if isinstance(rule.spec, ShareBatchStatistics)]
    shared = with_shared_statistics(of_other)
    assert [rule.spec for rule in shared.rules].count(ShareBatchStatistics()) == 1
    assert with_shared_statistics(shared) == shared
    alone = plan(profile(), devices=1, policy="paper")
    assert with_shared_statistics(alone) == alone


def test_more_cells_in_a_step_than_there_are_is_said() -> None:
    made = plan(profile(), devices=8, batch_size=64, model_parallel_size=1, strategies="S1")
    assert (
        "a step has 8 x 64 = 512 cells, and hic has 400, rna has 466: some cells come more than once in a"
        " step; choose fewer cells per rank, or fewer ranks on the data axis"
    ) in made.notes
    assert not [n for n in plan(profile(), devices=2, batch_size=64).notes if "some cells come more than once" in n]


def test_sizes_that_no_model_can_have() -> None:
    for latent_dim in (-800, 0, 7):
        with pytest.raises(
            PlanError, match=f"latent_dim={latent_dim} is not supported; allowed .* even for local attention"
        ):
            reference_shape(profile(), batch_size=8, latent_dim=latent_dim)
    with pytest.raises(PlanError, match="window=0 is not supported; allowed is a whole number of bins"):
        reference_shape(profile(), batch_size=8, window=0)


def test_a_module_that_was_not_detected_is_not_said_to_fit() -> None:
    unknown = ModelShape(batch_size=8, parameter_bytes=1000, base_activation_bytes=0)
    made = plan(profile(rna()), devices=2, device_memory="1GiB", shape=unknown)
    assert made.strategies == ("S1",)
    assert made.fits is None
    assert (made.predicted_step_seconds, made.predicted_rest_seconds, made.rates_device) == (None, None, "")
    assert "unknown, at least 2.93 KiB of 1.00 GiB: weights, gradients," in " ".join(plan_report(made).split())
    assert "ShareBatchStatistics" not in plan_report(made), "there is no batch norm"
    for normed in (None, replace(unknown, batch_norms=True)):
        assert "ShareBatchStatistics" in plan_report(plan(profile(rna()), devices=2, shape=normed))
    tight = plan(profile(rna()), devices=2, device_memory="1MiB", shape=replace(unknown, parameter_bytes=10**7))
    assert tight.fits is False
    assert "without the activations, which are not known" in plan_report(tight)
    assert "no decomposed decoder was detected: data parallelism (S1) only" in plan_report(made)
    assert "paper" not in plan_report(plan(profile(rna())))


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("24GiB", 24 * 2**30), ("24 gb", 24 * 10**9), ("1.5k", 1536), (7, 7), ("1048576", 2**20), ("2TiB", 2 * 2**40)],
)
def test_sizes_are_read(text, n_bytes) -> None:
    assert parse_bytes(text) == n_bytes


def test_the_model_axis_has_no_more_ranks_than_there_are_channels() -> None:
    data = profile(hic(), rna())
    asked = {"devices": 96, "strategies": "S5", "shape": reference_shape(data, batch_size=4, latent_dim=64)}
    made = plan(data, **asked)
    assert (made.mesh.data, made.mesh.model) == (3, 32)
    with pytest.raises(PlanError, match="S5 got 48 ranks .* D=64 can be split over 32 at most"):
        plan(data, **asked, model_parallel_size=48)


def test_the_model_axis_has_no_more_ranks_than_there_are_buckets() -> None:
    data = profile(hic(anchors=61, strata=2), rna())
    ours = reference_shape(data, batch_size=4, window=20)
    for strategies, ranks in (("nodes", 4), ("S4,nodes", 2)):
        made = plan(data, devices=4, strategies=strategies, model_parallel_size=ranks, shape=ours)
        assert made.mesh.model == ranks, "61 anchors fill 4 buckets"
    for strategies, ranks in (("nodes", 4), ("strata", 2), ("S4,nodes", 4)):
        assert plan(data, devices=8, strategies=strategies, shape=ours).mesh.model == ranks
    with pytest.raises(
        PlanError, match="nodes got 8 ranks .* N=61 anchors in buckets of 20 can be split over 4 at most; choose a"
    ):
        plan(data, devices=8, strategies="nodes", model_parallel_size=8, shape=ours)
    for window, devices, found in (
        (61, 2, "N=61 anchors in buckets of 61 cannot be split; choose a smaller window, or leave"),
        (40, 3, "no number of ranks that N=61 .* can be split over, up to 2, divides 3 devices; choose a smaller"),
        (20, 1, "that has one rank with devices=1; use two ranks or more"),
    ):
        few = reference_shape(data, batch_size=4, window=window)
        with pytest.raises(PlanError, match=f"nodes split a module over the model axis, and {found}"):
            plan(data, devices=devices, strategies="nodes", shape=few)
    compared = plan(data, devices=8, model_parallel_size=8, shape=ours).candidates
    assert compared
    assert not any("nodes" in c.strategies for c in compared)


TABLE_4 = {HIGH_INPUT_DIMENSIONALITY: ["S2", "S4"], ATTENTION_DECODER: ["S3"], HEAVY_DECOMPOSITION: ["S5"]}


def test_each_signal_asks_for_the_strategies_of_table_4() -> None:
    asked = {signal: [s for s, row in STRATEGIES.items() if row.signal == signal] for signal in SIGNALS}
    assert asked == TABLE_4
    assert STRATEGIES["S1"].signal is None


@pytest.mark.parametrize(("bins", "batch_size"), [(5_400, 256), (27_000, 128)])
def test_light_configurations_get_data_parallelism_only(bins, batch_size) -> None:
    data = profile(hic(anchors=bins, strata=10), rna())
    made = paper(data, devices=4, device_memory="24GiB", batch_size=batch_size)
    assert len(made.signals) == 3
    assert made.strategies == ("S1",)
    assert made.fits


def test_s5_is_added_when_the_epm_under_the_others_exceeds_the_budget() -> None:
    others = ("S1", "S2", "S3", "S4")
    for model_parallel_size, ranks in (("auto", 8), (2, 2)):
        peak = predict(shape(), others, model_ranks=ranks).peak_bytes
        for budget, expected in ((peak, others), (peak - 1, (*others, "S5"))):
            made = paper(profile(), devices=8, device_memory=budget, model_parallel_size=model_parallel_size)
            assert made.strategies == expected
    one = profile(hic(strata=1), rna())
    assert paper(one, devices=8, device_memory="1MiB").strategies == others


def test_full_attention_has_nothing_in_place_of_s3_and_nodes_in_place_of_s5() -> None:
    """The paper's two are of local attention; of full attention it names kernels and sequence parallelism."""
    data = profile(with_full_attention(hic()), rna())
    others = ("S1", "S2", "S4")
    peak = predict(reference_shape(data, batch_size=256), others, model_ranks=8).peak_bytes
    for budget, expected in ((peak, others), (peak - 1, (*others, "nodes"))):
        assert paper(data, devices=8, device_memory=budget).strategies == expected


def test_every_spec_belongs_to_one_technique_and_has_an_installer_unless_the_strategy_carries_it_out() -> None:
    owned = [spec for row in STRATEGIES.values() for spec in row.specs]
    assert len(owned) == len(set(owned))
    for name, row in STRATEGIES.items():
        by_strategy = name == "S1" or row.data_axis or row.steps
        assert set(row.installers) == (set() if by_strategy else set(row.specs)), name
        for installer in row.installers.values():
            assert callable(installer.load())


def test_axes_follow_from_the_strategies() -> None:
    assert Axes.of(()) == Axes.of(("S1",)) == Axes()
    paper = Axes.of(("S1", "S2", "S3", "S4", "S5"))
    assert paper == Axes(placement="hidden", features="sharded", attention="chunked", decode="key-first")
    ours = Axes.of(("S1", "S2", "S4", "fused", "sparse", "stream", "strata"))
    # S2 is left with the layers outside the decoder
    assert ours == Axes(
        placement="strata", attention="fused", decode="key-first", likelihood="sparse", activations="stream"
    )


DATA = profile(hic(anchors=1500, strata=6), rna())


def test_a_plan_that_has_it() -> None:
    made = plan(DATA, strategies="S4,fused,sparse,stream,compile")
    assert made.axes.kernels == "compiled"
    assert CompileStrata() in [rule.spec for rule in made.rules]
    assert [rule.spec.workers for rule in made.rules if isinstance(rule.spec, StreamStrata)] == [1]
    assert Plan.from_json(made.to_json()) == made
    text = plan_report(made)
    assert "compile strata" in text
    assert "strata that are not compiled" in text
    as_is = plan(DATA, strategies="S4,fused,sparse,stream")
    assert made.predicted_peak_bytes == as_is.predicted_peak_bytes


@pytest.mark.parametrize("other", ["S2", "S5", "nodes"])
def test_not_beside_what_sends_inside_a_stratum(other: str) -> None:
    with pytest.raises(PlanError, match=f"{other} and compile cannot be together: ranks send"):
        plan(DATA, devices=2, strategies=f"{other},compile")
