"""Claim: whichever way a rank ends, all processes end within seconds, each with a message that names the rank and what
it was doing; none is left, the last complete checkpoint is intact, and resuming loses nothing but the steps after it.
Who ends a run by Ctrl-C, or loses a rank, reads in the last line what to do, or whose fault it was.

The faults are injected once, some at a time; tests read what came of it.
"""

import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_amp.cli import main as cli
from lightning_amp.cli.commands import profile
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.lightning.faults.activity import is_out_of_memory
from lightning_amp.lightning.faults.launchers import how_to_resume
from lightning_amp.lightning.steps.out_of_memory import advice_on_memory
from lightning_amp.lightning.steps.training_step import FiniteCheck
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Candidate
from tests.any_module import QUIET
from tests.lightning.faults.fault_cases import Case, Outcome, run_group, run_scripts
from tests.lightning.faults.fault_table import ROWS, Row, cells, committed, run_all, said

# it measures seconds of several processes
pytestmark = pytest.mark.alone

BOUND_S = 30.0
"""On a busy machine; the table has what a quiet one takes."""

Found = dict[str, tuple[Outcome, Path]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_all(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome = run_group(Case(epoch=2), folder)
    assert outcome.statuses == [0, 0], outcome.texts
    assert not any(said(text) for text in outcome.texts), "nothing is said of a run without faults"
    return folder


def killed(row: Row) -> bool:
    return row.case.how in ("kill", "killed while saving")


@pytest.mark.ranks
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_every_process_ends_in_time_and_names_the_rank(row: Row, found: Found) -> None:
    outcome, folder = found[row.what]
    assert outcome.left == []
    assert all(status not in (0, None) for status in outcome.statuses)
    assert outcome.seconds < BOUND_S
    for rank, text in enumerate(outcome.texts):
        if killed(row) and not row.launched and rank == row.case.rank:
            continue
        messages = said(text)
        assert messages, text
        frozen = row.case.how == "stop" and rank == row.case.rank
        # the whole job was asked to end, and how to go on is no fault
        faults = [m for m in messages if "SIGTERM" not in m and not m.startswith("interrupted; to go on")]
        assert frozen or all(row.says in message for message in faults), messages
        assert frozen or any(row.says in message for message in messages), messages
    # complete checkpoints are intact, and no other is there
    files = sorted(folder.glob("*.ckpt"))
    assert [file.name for file in files] == (["step=2.ckpt", row.saved] if row.saved else [])
    for file in files:
        assert zipfile.ZipFile(file).testzip() is None
        assert torch.load(file, weights_only=True)["global_step"] == int(file.stem.partition("=")[2])


@pytest.mark.long
def test_resuming_loses_nothing_but_the_steps_after_the_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    """With checkpoints at the ends of epochs: from within one, Lightning reads the epoch's data from its beginning."""
    run_group(Case(0, "save_checkpoint", "killed while saving", epoch=2), tmp_path)
    assert list(tmp_path.glob(".partial-*")), "it was killed after it had begun to write"
    outcome = run_group(Case(resume="step=4.ckpt", epoch=2), tmp_path)
    assert outcome.statuses == [0, 0], outcome.texts
    one, other = (torch.load(at / "end0.pt")["state"] for at in (undisturbed, tmp_path))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not list(tmp_path.glob(".partial-*")), "what a killed process has left is removed"


def test_the_committed_table_is_that_of_the_rows() -> None:
    rows = committed()
    assert len(rows) >= 12
    assert [[*row[:2], *row[3:]] for row in rows] == [[*c[:2], *c[3:]] for c in (cells(r, "") for r in ROWS)]
    assert all(0 < float(row[2]) < BOUND_S for row in rows)


def test_an_incomplete_checkpoint_is_refused_with_the_complete_ones(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copy(undisturbed / "step=4.ckpt", tmp_path)
    whole = (undisturbed / "step=6.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    outcome = run_group(Case(resume="cut.ckpt"), tmp_path)
    assert all(outcome.statuses)
    for text in outcome.texts:
        assert f"is not complete, found {len(whole) // 2:,} bytes" in text
        assert "complete in the same folder: ['step=4.ckpt']" in text


def test_ranks_with_other_data_refuse_to_start_and_show_the_difference(tmp_path: Path) -> None:
    for cells_of_hic, name in ((6, "a"), (7, "b")):
        out = tmp_path / name
        synthesize(out, cells=cells_of_hic, rna_cells=5, bins=12, strata=2, genes=6, seed=2)
    case = Case(1, settings={"data_dir": str(tmp_path / "a")}, settings_of_faulty={"data_dir": str(tmp_path / "b")})
    outcome = run_group(case, tmp_path / "run")
    assert all(outcome.statuses)
    for text in outcome.texts:
        assert "1 of them see something else than rank 0, first rank 1" in text
        assert "data.modality.hic.cells is 6 on rank 0 and 7 on rank 1" in text
        assert not said(text), "what all ranks raise is said by the error alone"


# --- the last line of a run that ends ---


STUCK = Case(0, "on_train_batch_start", "stick")


def press(started: list["subprocess.Popen[str]"]) -> None:
    """As a terminal does: all processes of the job get the signal."""
    first = psutil.Process(started[0].pid)
    for process in [*first.children(), first]:
        process.send_signal(signal.SIGINT)


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_an_interrupted_run_says_how_to_go_on_with_status_130(tmp_path: Path, devices: int) -> None:
    outcome = run_scripts(STUCK, tmp_path, [[sys.executable]], devices=devices, after_fault=press)
    assert outcome.statuses == [130]
    assert outcome.left == []
    last = outcome.texts[0].strip().splitlines()[-1]
    path = tmp_path / "step=4.ckpt"
    assert last == (
        f"lightning_amp: interrupted; to go on: trainer.fit(..., ckpt_path={str(path)!r}), or --ckpt_path {path}"
    )


def test_without_a_checkpoint_it_says_so() -> None:
    trainer = Trainer(accelerator="cpu", callbacks=[ModelCheckpoint()], **QUIET | {"enable_checkpointing": True})
    assert how_to_resume(trainer) == ""
    trainer.state.fn = "fit"
    assert "no checkpoint has been written" in how_to_resume(trainer)
    assert how_to_resume(None) == ""


@pytest.mark.ranks
def test_what_is_said_of_a_killed_rank_is_the_last_line_under_a_short_traceback(found: Found) -> None:
    outcome, _ = found["rank 1, started by the Trainer, is killed"]
    lines = outcome.texts[0].strip().splitlines()
    assert "RuntimeError: rank 1 (" in lines[-1], lines
    assert "was ended by SIGKILL" in lines[-1], lines
    assert len([line for line in lines if line.startswith("[rank0]:")]) <= 10
    assert not [line for line in lines if "torch/distributed" in line]


def test_the_command_line_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "read", interrupt)
    assert cli.main(["profile", "anything"]) == 130
    assert capsys.readouterr().err == "lightning-amp: interrupted\n"


# --- parts, without a Trainer ---


class Strata(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.strata = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stratum in self.strata:
            x = stratum(x)
        return x


@pytest.fixture
def watched() -> Iterator[tuple[Strata, FiniteCheck]]:
    torch.manual_seed(0)
    module = Strata()
    check = FiniteCheck(module, rank=3, gradients=True)
    yield module, check
    check.remove()


def test_parameters_that_are_unfrozen_later_are_watched() -> None:
    module = Strata().requires_grad_(False)
    check = FiniteCheck(module, rank=3, gradients=True)
    module.requires_grad_(True)
    check.start()
    (module(torch.ones(1, 2)).sum() * torch.inf).backward()
    with pytest.raises(ModelError, match="a gradient that is not finite"):
        check.check_gradients()
    check.remove()


def test_the_first_module_and_stratum_are_named(watched: tuple[Strata, FiniteCheck]) -> None:
    module, check = watched
    check.check_loss(module(torch.ones(1, 2)).sum())
    with torch.no_grad():
        module.strata[1].weight[0, 0] = torch.inf
    with pytest.raises(ModelError, match=r"rank 3 found a loss of .*module 'strata.1' \(stratum 1\)"):
        check.check_loss({"loss": module(torch.ones(1, 2)).sum()})
    check.start()
    with pytest.raises(ModelError, match="every module's output was finite"):
        check.check_loss(torch.tensor(torch.nan))
    with pytest.raises(ModelError, match=r"outside of modules, before 'strata.0' \(stratum 0\) read it"):
        check.check_loss(module(torch.full((1, 2), torch.nan)).sum())


def test_the_first_parameter_whose_gradient_is_not_finite_is_named(watched: tuple[Strata, FiniteCheck]) -> None:
    module, check = watched
    x = module.strata[1](module.strata[0](torch.ones(1, 2)))
    x.register_hook(lambda grad: grad * torch.inf)
    module.strata[2](x).sum().backward()
    with pytest.raises(ModelError, match=r"first that of parameter 'strata.1.\w+' \(stratum 1\)"):
        check.check_gradients()
    check.start()
    check.check_gradients()


def test_out_of_memory_is_told_with_the_next_plan_to_try() -> None:
    class Made:
        batch_size, predicted_peak_bytes, budget_bytes, diagnosis, uncounted = 8, 3 << 20, 4 << 20, None, ""
        strata_bytes = (1 << 20,)
        candidates = tuple(
            Candidate(strategies=("S1", s), data=1, model=2, peak_bytes=n, step_seconds=1, cell_seconds=t)
            for s, n, t in (("S3", 2 << 20, 2), ("stream", 1 << 20, 3), ("S5", 5 << 19, 1), ("S4", 3 << 20, 1))
        )

    text = advice_on_memory(Made(), torch.device("cpu"))  # type: ignore[arg-type]
    assert "A peak of 3.00 MiB was predicted for 8 cells, of 4.00 MiB" in text
    assert "The next plan to try is strategies='S1,S3' with model_parallel_size=2: 2.00 MiB" in text, "the fastest"
    Made.candidates = Made.candidates[2:]
    text = advice_on_memory(Made(), torch.device("cpu"))  # type: ignore[arg-type]
    assert "The next plan to try is strategies='S1,S5' with model_parallel_size=2: 2.50 MiB" in text, "the least"
    Made.candidates = ()
    assert "No plan for these ranks needs less" in advice_on_memory(Made(), torch.device("cpu"))  # type: ignore[arg-type]
    assert "No plan was made yet" in advice_on_memory(None, torch.device("cpu"))
    told = (
        "DefaultCPUAllocator: can't allocate memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED when",
    )
    assert all(map(is_out_of_memory, (MemoryError(), *map(RuntimeError, told))))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    # of torch.tensor([norm of a DTensor, ...])
    without_data = "If you're using Caffe2, call mutable_data() to actually allocate memory"
    assert not is_out_of_memory(RuntimeError(without_data))


@pytest.mark.parametrize("option", ["lost_after", "stuck_after"])
@pytest.mark.parametrize("value", [0, -1, True, "60", float("nan")])
def test_times_are_checked(option: str, value: Any) -> None:
    with pytest.raises(PlanError, match=rf"{option}=.* is not supported; allowed is a number of seconds above 0"):
        AMPStrategy(**{option: value})
