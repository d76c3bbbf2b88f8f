"""Claim: the library's rows are those of the paper's Table 4, light configurations get S1 (Table 6), and all parts of a
plan follow from these rows.
"""

import pytest

from lightning_amp.costs.model_shape import reference_shape
from lightning_amp.diagnosis import ATTENTION_DECODER, HEAVY_DECOMPOSITION, HIGH_INPUT_DIMENSIONALITY, SIGNALS
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.plan import Axes
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.techniques.table import STRATEGIES
from tests.planning.profiles import hic, profile, rna, shape, with_full_attention

TABLE_4 = {HIGH_INPUT_DIMENSIONALITY: ["S2", "S4"], ATTENTION_DECODER: ["S3"], HEAVY_DECOMPOSITION: ["S5"]}


def test_each_signal_asks_for_the_strategies_of_table_4() -> None:
    asked = {signal: [s for s, row in STRATEGIES.items() if row.signal == signal] for signal in SIGNALS}
    assert asked == TABLE_4
    assert STRATEGIES["S1"].signal is None


@pytest.mark.parametrize(("bins", "batch_size"), [(5_400, 256), (27_000, 128)])
def test_light_configurations_get_data_parallelism_only(bins, batch_size) -> None:
    made = plan(
        profile(hic(anchors=bins, strata=10), rna()),
        devices=4,
        device_memory="24GiB",
        policy="paper",
        batch_size=batch_size,
    )
    assert len(made.signals) == 3
    assert made.strategies == ("S1",)
    assert made.fits


def test_s5_is_added_when_the_epm_under_the_others_exceeds_the_budget() -> None:
    others = ("S1", "S2", "S3", "S4")
    for model_parallel_size, ranks in (("auto", 8), (2, 2)):
        peak = predict(shape(), others, model_ranks=ranks).peak_bytes
        for budget, expected in ((peak, others), (peak - 1, (*others, "S5"))):
            made = plan(
                profile(),
                devices=8,
                device_memory=budget,
                batch_size=256,
                model_parallel_size=model_parallel_size,
                policy="paper",
            )
            assert made.strategies == expected
    one = profile(hic(strata=1), rna())
    flat = plan(one, devices=8, device_memory="1MiB", batch_size=256, policy="paper")
    assert flat.strategies == others


def test_full_attention_has_nothing_in_place_of_s3_and_nodes_in_place_of_s5() -> None:
    """The paper's two are of local attention; of full attention it names kernels and sequence parallelism."""
    data = profile(with_full_attention(hic()), rna())
    others = ("S1", "S2", "S4")
    peak = predict(reference_shape(data, batch_size=256), others, model_ranks=8).peak_bytes
    for budget, expected in ((peak, others), (peak - 1, (*others, "nodes"))):
        made = plan(data, devices=8, device_memory=budget, batch_size=256, policy="paper")
        assert made.strategies == expected


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
