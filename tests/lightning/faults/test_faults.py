"""Claim: whichever way a rank ends, all processes end within seconds, each with a message that names the rank and what
it was doing; none is left, the last complete checkpoint is intact, and resuming loses nothing but the steps after it.

The faults are injected once, some at a time; tests read what came of it.
"""

import shutil
import socket
import time
import zipfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import DataError, ModelError, PlanError
from lightning_amp.lightning.checkpoints.write_checkpoint import AtomicCheckpointIO
from lightning_amp.lightning.faults.activity import Doing, is_out_of_memory
from lightning_amp.lightning.faults.detector import Detector
from lightning_amp.lightning.faults.link import Link, connect, listen
from lightning_amp.lightning.steps.out_of_memory import advice_on_memory
from lightning_amp.lightning.steps.training_step import FiniteCheck
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Candidate
from tests.lightning.faults.fault_cases import Case, Outcome, run_group
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
    outcome = run_group(Case(), folder)
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
def test_resuming_loses_nothing_but_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    """With checkpoints at the ends of epochs: from within one, Lightning reads the epoch's data from its beginning."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    run_group(Case(epoch=2), whole)
    run_group(Case(0, "save_checkpoint", "killed while saving", epoch=2), folder)
    assert list(folder.glob(".partial-*")), "it was killed after it had begun to write"
    outcome = run_group(Case(resume="step=4.ckpt", epoch=2), folder)
    assert outcome.statuses == [0, 0], outcome.texts
    one, other = (torch.load(at / "end0.pt")["state"] for at in (whole, folder))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not list(folder.glob(".partial-*")), "what a killed process has left is removed"


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


# --- parts, without a Trainer ---


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "deep" / "last.ckpt"
    io.save_checkpoint({"a": torch.ones(3)}, path)

    class Full(FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > 100:
                raise OSError(28, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering=-1: Full(path, mode))
    with pytest.raises(DataError, match=r"cannot be written: .*No space left .* is untouched, .* are free"):
        io.save_checkpoint({"a": torch.zeros(3)}, path)
    monkeypatch.undo()
    assert io.load_checkpoint(path)["a"].tolist() == [1, 1, 1]
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]
    io.save_checkpoint({"a": torch.zeros(3)}, path)
    assert io.load_checkpoint(path)["a"].tolist() == [0, 0, 0]


def test_what_is_no_folder_and_what_is_not_pickled_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written: .*; no file of that name was left"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "file" / "a.ckpt")
    with pytest.raises(Exception, match="pickle") as caught:
        AtomicCheckpointIO().save_checkpoint({"a": lambda: 1}, tmp_path / "b.ckpt")
    assert not isinstance(caught.value, DataError)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    with pytest.raises(FileNotFoundError):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")


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
    assert "a peak of 3.00 MiB was predicted for 8 cells, of 4.00 MiB" in text
    assert "The next plan to try is strategies='S1,S3' with model_parallel_size=2: 2.00 MiB" in text, "the fastest"
    Made.candidates = Made.candidates[2:]
    text = advice_on_memory(Made(), torch.device("cpu"))  # type: ignore[arg-type]
    assert "The next plan to try is strategies='S1,S5' with model_parallel_size=2: 2.50 MiB" in text, "the least"
    Made.candidates = ()
    assert "No plan for these ranks needs less" in advice_on_memory(Made(), torch.device("cpu"))  # type: ignore[arg-type]
    assert "No plan was made yet" in advice_on_memory(None, torch.device("cpu"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.parametrize("option", ["lost_after", "stuck_after"])
@pytest.mark.parametrize("value", [0, -1, True, "60", float("nan")])
def test_times_are_checked(option: str, value: Any) -> None:
    with pytest.raises(PlanError, match=rf"{option}=.* is not supported; allowed is a number of seconds above 0"):
        AMPStrategy(**{option: value})


def test_a_stranger_on_the_watch_s_port_is_not_listened_to() -> None:
    listener = listen("localhost")
    port = listener.getsockname()[1]
    limits = {"lost_after": 4, "stuck_after": 4}
    watch = Detector(0, Doing, **limits, listener=listener, link=None, token="secret")
    for message in ({"hello": 1, "token": "guess", "host": "x"}, {"fault": {"rank": 1, "host": "x", "what": "y"}}):
        link = connect("localhost", port, timeout=5)
        link.send(**message)
        assert link.receive() is None, "it hangs up"
        link.close()
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert Link(raw).receive() is None
    assert watch.fault is None
    watch.stop(failed=False)


def test_a_rank_that_ends_well_is_no_fault() -> None:
    listener = listen("localhost")
    limits = {"lost_after": 1, "stuck_after": 100}
    first = Detector(0, Doing, **limits, listener=listener, link=None, token="t")
    link = connect("localhost", listener.getsockname()[1], timeout=5)
    second = Detector(1, Doing, **limits, listener=None, link=link, token="t")
    time.sleep(0.3)
    second.stop(failed=False)
    time.sleep(1.5)
    assert first.fault is None
    assert first.ended_ranks() == [1]
    first.stop(failed=False)
