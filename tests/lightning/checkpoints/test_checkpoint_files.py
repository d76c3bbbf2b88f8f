"""Claim: a directory of shards cannot run code when it is read, unless its reader says weights_only=False; a checkpoint
that cannot be written leaves the one before, and no other file, wherever it is written.
"""

import errno
import fcntl
import os
import pickle
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from io import BufferedWriter, BytesIO, FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader

from lightning_amp.cli.main import main
from lightning_amp.errors import DataError
from lightning_amp.lightning.checkpoints.read_directory import open_directory
from lightning_amp.lightning.checkpoints.write_checkpoint import AtomicCheckpointIO, _aside, _remove_left_over
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.any_module import QUIET
from tests.lightning.strategy.model_axis_cases import Maps, loader_of, trainer_of
from tests.ranks import run_ranks

WEIGHT = torch.arange(6.0).reshape(2, 3)


class Runs:
    """What reading it does: it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.folder,)


class Renamed:
    """The same, with a class of torch's own around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Metadata, ({}, Runs(self.folder), {})


def in_metadata(folder: Path, inside: Callable[[Path], Any], ran: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(inside(ran)))


def in_meta(folder: Path, inside: Callable[[Path], Any], ran: Path) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": inside(ran)}, folder / "meta.pt")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "shards.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({"state_dict/w": WEIGHT}, checkpoint_id=folder, no_dist=True)
    skeleton = {"state_dict": {"w": WEIGHT.to("meta")}, "hyper_parameters": {"lr": 0.1}}
    torch.save(skeleton, folder / "meta.pt")
    return folder


@pytest.mark.parametrize("inside", [Runs, Renamed])
@pytest.mark.parametrize(("place", "name"), [(in_metadata, ".metadata"), (in_meta, "meta.pt")])
def test_a_pickle_that_runs_code_is_refused(
    directory: Path, tmp_path: Path, place: Callable[..., None], name: str, inside: Callable[[Path], Any]
) -> None:
    ran = tmp_path / "ran"
    place(directory, inside, ran)
    for weights_only in (None, True):
        with pytest.raises(DataError, match=rf"its file '{name}' contains '.*', which is neither .*weights_only=False"):
            open_directory(directory, weights_only=weights_only)
    assert not ran.exists()
    # what is left of it may be no checkpoint
    with suppress(DataError):
        open_directory(directory, weights_only=False)
    assert ran.is_dir()


@pytest.mark.parametrize("place", [in_metadata, in_meta])
def test_a_run_refuses_to_resume_from_it(directory: Path, tmp_path: Path, place: Callable[..., None]) -> None:
    place(directory, Runs, tmp_path / "ran")
    trainer = Trainer(strategy="amp", accelerator="cpu", devices=1, max_steps=1, **QUIET)
    with pytest.raises(DataError, match="could run code"):
        trainer.fit(BoringModel(), ckpt_path=str(directory))
    assert not (tmp_path / "ran").exists()


def test_the_command_refuses_it_unless_it_is_trusted(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = torch.load(directory / "meta.pt", weights_only=True)
    torch.save(meta | {"hyper_parameters": Runs(tmp_path / "ran")}, directory / "meta.pt")
    asked = ["convert", str(directory), "--out", str(tmp_path / "out.ckpt")]
    assert main(asked) == 2
    assert "`lightning-amp convert --trust`" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert main([*asked, "--trust"]) == 0
    assert torch.equal(torch.load(tmp_path / "out.ckpt")["state_dict"]["w"], WEIGHT)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1}), b"\x80\x04\x8c\x01a\x93."])
def test_metadata_that_are_none_are_damaged(directory: Path, content: bytes) -> None:
    (directory / ".metadata").write_bytes(content)
    with pytest.raises(DataError, match="has no file '.metadata' that can be read"):
        open_directory(directory)


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


def test_a_write_that_takes_a_part_of_its_bytes_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(FileIO):
        """As the call of the system, which writes 2 GiB at most."""

        def write(self, data: Any) -> int:
            return super().write(memoryview(data)[:1000])

    def opened(path: Path, mode: str, buffering: int = -1) -> Any:
        return BufferedWriter(Short(path, mode)) if buffering else Short(path, mode)

    monkeypatch.setattr(Path, "open", opened)
    AtomicCheckpointIO().save_checkpoint({"a": torch.arange(5000)}, tmp_path / "a.ckpt")
    monkeypatch.undo()
    assert torch.equal(torch.load(tmp_path / "a.ckpt")["a"], torch.arange(5000))


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


def test_writers_of_one_name_and_process_do_not_share_a_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    left = tmp_path / f".partial-{platform.node()}-{os.getpid()}-dead"
    left.touch()
    with _aside(first) as one, _aside(second) as two:
        one.write(b"1")
        two.write(b"2")
        _remove_left_over(tmp_path)
        assert not left.exists()
    assert (first.read_bytes(), second.read_bytes()) == (b"1", b"2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt"]


def test_a_file_removed_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, calls = fcntl.flock, list[int]()

    def late(file: Any, kind: int) -> None:
        calls.append(kind)
        if len(calls) == 1:
            _remove_left_over(tmp_path)
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt") == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_file_system_without_locks_and_flushes_has_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = errno.EINVAL

    def without(*_: Any) -> None:
        raise OSError(number, "not here")

    for module, name in ((os, "fsync"), (fcntl, "flock")):
        monkeypatch.setattr(module, name, without)
    AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    number = errno.EIO
    with pytest.raises(DataError, match="not here"):
        AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "b.ckpt")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


# Claim: a Trainer can be deep-copied and saved while it fits, and can save once the ranks of a fit are gone.

OPTIONS: dict[int, dict[str, Any]] = {1: {}, 2: {"strategies": "S2,S3", "model_parallel_size": 2}}

SAVES = """\
import sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_amp

if __name__ == "__main__":
    for name in sys.argv[2:]:
        trainer = Trainer(
            strategy=name, accelerator="cpu", devices=2, max_steps=2, limit_val_batches=0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        module = BoringModel()
        before = module.layer.weight.clone()
        trainer.fit(module)
        trainer.save_checkpoint(sys.argv[1])
        saved = torch.load(sys.argv[1])["state_dict"]
        assert not torch.equal(before, module.layer.weight), "trained"
        assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
        print("saved after", name)
"""


class Copies(Callback):
    """Copies the Trainer at every turn, and ends the copies' runs."""

    def __init__(self) -> None:
        self.copies = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        copy = deepcopy(trainer)
        assert copy.lightning_module is not pl_module
        copy.strategy._remove_installed()  # type: ignore[attr-defined]
        self.copies += 1

    on_train_batch_end = on_train_end = on_train_start  # type: ignore[assignment]


def trained(rank: int, ranks: int) -> dict[bool, Any]:
    """Parameters after a fit, by whether the Trainer was copied in it."""
    found = {}
    for copied in (False, True):
        callbacks = [Copies()] if copied else []
        trainer = trainer_of(rank, ranks, AMPStrategy(**OPTIONS[ranks]), max_epochs=1, callbacks=callbacks)
        seed_everything(7)
        module = Maps()
        trainer.fit(module, loader_of(rank, ranks))
        found[copied] = {name: value.detach().clone() for name, value in module.state_dict().items()}
        if copied:
            assert callbacks[0].copies > 2
            deepcopy(trainer)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", OPTIONS)
def test_a_trainer_can_be_copied_during_a_fit_which_does_not_notice(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(trained, ranks, tmp_path):
        assert all(torch.equal(found[True][name], value) for name, value in found[False].items())


class Saves(Callback):
    def __init__(self) -> None:
        self.saved: list[Trainer] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        file = BytesIO()
        torch.save(trainer, file)
        file.seek(0)
        self.saved.append(torch.load(file, weights_only=False))


def test_a_trainer_can_be_saved_during_a_fit_and_after_it() -> None:
    saves, module = Saves(), BoringModel()
    trainer = Trainer(strategy="amp", accelerator="cpu", devices=1, max_steps=1, callbacks=[saves], **QUIET)
    trainer.fit(module, DataLoader(torch.ones(2, 32)))  # type: ignore[arg-type]
    saves.on_train_batch_end(trainer)
    assert len(saves.saved) == 2
    for found in saves.saved:
        assert isinstance(found.strategy, AMPStrategy)
        assert found.global_step == 1
        assert torch.equal(found.lightning_module.layer.weight, module.layer.weight)
        assert isinstance(found.strategy._lightning_optimizers[0], LightningOptimizer)


@pytest.mark.exhaustive
@pytest.mark.release
def test_a_checkpoint_can_be_saved_where_the_ranks_were_processes_of_the_fit(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    names = ["amp_spawn", "amp_notebook"]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "last.ckpt"), *names],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("saved")] == [
        f"saved after {name}" for name in names
    ]
