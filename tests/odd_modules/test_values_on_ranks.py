"""Claim: on two ranks steps that read values train as under DDP, or as one process does if their loss is a mean over
labels; validations under fsdp and sequence are predicted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp.errors import DoesNotFitError
from tests.any_module import Meter
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.odd_modules.test_steps_that_read_values import Logs, Masked, Mixture, N, Net
from tests.odd_modules.test_whole_fit import Net as Validated
from tests.odd_modules.test_whole_fit import Peaks, near, rows
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


def trained(rank: int, ranks: int, kind: type[Net], strategies: str, share: float) -> tuple[float, float]:
    """Difference of parameters to those of DDP or of one process, and predicted over measured bytes."""
    found, peaks, predicted = list[Any](), list[int](), 0
    one = kind is Masked
    for strategy in ("auto" if one else "ddp", strategies):
        torch.manual_seed(0)
        module, meter = kind().double(), Meter()
        torch.manual_seed(7)
        batches = [torch.randn(192, N, dtype=torch.float64) for _ in range(3)]
        if strategy != "auto":
            batches = [batch.chunk(ranks)[rank] for batch in batches]
        amp: Any = strategy
        if peaks:
            # with room for batches whose rows go to other experts
            amp = AMPStrategy(strategies=strategies, device_memory=int(share * peaks[0]))
        options: dict[str, Any] = {"precision": "64-true", "callbacks": [meter], "use_distributed_sampler": False}
        of = {"rank": 0, "ranks": 1} if amp == "auto" else {"rank": rank, "ranks": ranks}
        trainer = trainer_of(amp, **of, **options)
        torch.manual_seed(1)
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        found.append([value.clone() for value in module.state_dict().values()])
        peaks.append(meter.live.peak)
        predicted = amp.plan.predicted_peak_bytes if isinstance(amp, AMPStrategy) and amp.plan is not None else 0
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)), predicted / peaks[1]


@pytest.mark.parametrize(("kind", "strategies", "share"), [
    pytest.param(Mixture, "fsdp,recompute", 0.9, marks=pytest.mark.full), (Masked, "recompute", 0.5),
    (Logs, "replay", 0.8),
])  # fmt: skip
def test_steps_that_read_values_train_as_under_ddp(
    kind: type[Net], strategies: str, share: float, tmp_path: Path
) -> None:
    for difference, ratio in run_ranks(trained, 2, tmp_path, kind, strategies, share):
        assert difference == (pytest.approx(0, abs=1e-14) if kind is Masked else 0.0)
        assert ratio == pytest.approx(1, rel=0.05)


class Logged(Validated):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss(batch).item())


def validated(rank: int, ranks: int, budget: str, shape: tuple[int, ...], options: dict[str, Any]) -> Any:
    peaks, strategy = Peaks(), AMPStrategy(device_memory=budget, **options)
    usual: dict[str, Any] = {"max_epochs": 1, "callbacks": [peaks], "use_distributed_sampler": False}
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, max_steps=-1, **usual)
    module: Any = Logged() if options["strategies"] == "fsdp" else Validated()
    try:
        trainer.fit(module, rows((32, *shape)), rows((512, *shape), n=2))
    except DoesNotFitError as error:
        return str(error)
    finally:
        peaks.close()
    assert strategy.plan is not None
    return strategy.plan, peaks.of


@pytest.mark.parametrize(("shape", "options"), [
    ((16,), {"strategies": "fsdp"}), ((6, 16), {"strategies": "sequence", "model_parallel_size": 2}),
])  # fmt: skip
def test_a_validation_is_predicted(shape: tuple[int, ...], options: dict[str, Any], tmp_path: Path) -> None:
    # a thread of gloo may hold what was sent a moment longer than the collective: one more try then
    for last in (False, True):
        found = run_ranks(validated, 2, tmp_path, "64MiB", shape, options)
        # under fsdp a gathered block counts until the next one
        measured = [near(own["validation"]) if shape[1:] else pytest.approx(own["validation"], rel=0.02)
                    for _, own in found]  # fmt: skip
        if last or all(plan.validation.peak_bytes == own for (plan, _), own in zip(found, measured, strict=True)):
            break
    for (plan, peaks), near_it in zip(found, measured, strict=True):
        assert plan.predicted_peak_bytes == plan.validation.peak_bytes == near_it
        assert peaks["validation"] > 2 * peaks["training"]
    for said in run_ranks(validated, 2, tmp_path, "300KiB", shape, options):
        assert "the largest validation batch that fits is" in said
