"""Claim: the memory monitor writes when every rank of a pipeline has computed what in one step: all passes of the
schedule in its order, none before its input was there, beside the plan's; and draws both.
"""

import csv
import time
import warnings
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import StratumMemoryMonitor
from lightning_amp.techniques.pipeline.schedule.schedules import Pass, schedule
from tests.lightning.pipeline.pipeline_cases import GPT, LAYERS, Block, tokens, trainer_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
PARTS, SLEEP, STEPS = 4, 0.01, 3
SCHEDULES = ("gpipe", "1f1b", "interleaved")


class SlowBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        time.sleep(SLEEP)
        return super().forward(x, mask)


class Slow(GPT):
    """The last of its blocks take longer than anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(0.0) if i < LAYERS - 2 else SlowBlock(0.0) for i in range(LAYERS))
        self.double()


def fit(rank: int, ranks: int, name: str, folder: Path) -> list[str]:
    warnings.simplefilter("ignore")
    monitor = StratumMemoryMonitor(dirpath=folder / name)
    settings = {"schedule": name, "micro_batches": PARTS}
    trainer = trainer_of((rank, ranks), settings, {"callbacks": [monitor]})
    trainer.fit(Slow(), DataLoader(tokens(STEPS), batch_size=None))  # type: ignore[arg-type]
    assert trainer.strategy.pipelined_steps is None, "after the fit"  # type: ignore[attr-defined]
    return [path.name for path in monitor.written]


def runs(rank: int, ranks: int, folder: Path) -> dict[str, list[str]]:
    return {name: fit(rank, ranks, name, folder) for name in SCHEDULES}


def before(step: Pass, last: int) -> Pass | None:
    """Whose result a pass reads."""
    if step.backward:
        return step._replace(stage=step.stage + 1) if step.stage < last else step._replace(backward=False)
    return step._replace(stage=step.stage - 1) if step.stage else None


@pytest.mark.full
@pytest.mark.release
def test_every_pass_is_written_in_its_order_and_after_its_input(tmp_path: Path) -> None:
    written, other = run_ranks(runs, 2, tmp_path, tmp_path, timeout=200)
    for name in SCHEDULES:
        assert {"schedule.csv", "schedule.png"} <= {*written[name]}
        assert not other[name], "rank 0 writes"
        assert (tmp_path / name / "schedule.png").stat().st_size > 10_000
        with (tmp_path / name / "schedule.csv").open() as file:
            rows = list(csv.DictReader(file))
        # the second step was metered
        assert {row["step"] for row in rows} == {str(STEPS - 1)}
        rests = [row for row in rows if row["pass"] == "after the blocks"]
        assert [(row["rank"], row["micro_batch"]) for row in rests] == [("1", "")] * (name == "gpipe")
        passes = {
            Pass(row["pass"] == "backward", int(row["stage"]), int(row["micro_batch"])): row
            for row in rows
            if row not in rests
        }
        each = 2 if name == "interleaved" else 1
        orders = schedule(name, 2, PARTS, stages_per_device=each)
        for rank, order in enumerate(orders):
            assert tuple(step for step, row in passes.items() if row["rank"] == str(rank)) == order
            ends = [0.0, *(float(passes[step]["end_s"]) for step in order)]
            for step, free in zip(order, ends, strict=False):
                row = passes[step]
                begin, end = float(row["begin_s"]), float(row["end_s"])
                source = before(step, 2 * each - 1)
                assert free <= begin < end
                # a sleep is the pass's own, whoever waits for it
                slow = not step.backward and step.stage == 2 * each - 1
                assert end - begin >= SLEEP * slow
                assert source is None or float(passes[source]["end_s"]) <= begin
                assert float(row["predicted_begin_s"]) < float(row["predicted_end_s"])
