"""Claim: a checkpoint of any plan is the plain single-device one, and training goes on from it anywhere, alike.

Runs of one, two and four ranks save in mid-epoch after three of six steps, as a file or as a directory of shards, and
go on from each other's checkpoints; all must end where a plain Trainer ends that was never interrupted. Double
precision, so up to rounding. They are read as weights alone, which needs none of this package; damaged directories are
refused by name.
"""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_amp.cli.main import main
from lightning_amp.errors import DataError
from lightning_amp.lightning.checkpoints.read_directory import Stored, fill, load_either, open_directory
from lightning_amp.lightning.checkpoints.write_checkpoint import AtomicCheckpointIO, convert_checkpoint
from tests.lightning.checkpoints.state_cases import CASE, KINDS, N_FEATURES, Job, several
from tests.ranks import run_ranks

RTOL = 1e-9
CORE = ("plain", "ddp", "S2 + S5", "S2 in shards", "2 x 2")
FURTHER = ("strata", "nodes", "2 x 2 in shards")
PAIRS = [
    *zip(CORE, (*CORE[1:], CORE[0]), strict=True),
    *((reader, "S2 + S5") for reader in FURTHER),
    *(("plain", writer) for writer in FURTHER),
    *((reader, "2 x 2 in shards") for reader in ("ddp", "S2 + S5")),
    ("nodes", "strata"),
]
"""(goes on, has saved); each goes on from others, and what all save is the same."""
WRITE = [Job(kind=kind) for kind in KINDS]
RESUME = [Job(kind=kind, saved_by=by) for kind, by in PAIRS]
PLAIN = Job(kind="plain")
Runs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def phases() -> list[tuple[int, list[Job]]]:
    """What runs together, on how many ranks; jobs that read what the others save come after it."""
    left, saved, found = WRITE + RESUME, set(), []
    for ranks in (1, 2, 4, 2, 1):
        here = {job.name for job in WRITE if KINDS[job.kind].ranks == ranks}
        ready = saved | here
        jobs = [job for job in left if KINDS[job.kind].ranks == ranks and job.source in (ready, saved)[job.reads_file]]
        found.append((ranks, jobs))
        left = [job for job in left if job not in jobs]
        saved |= here
    assert not left, "every job has found its place"
    return found


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    """What every rank of every job found: the same four processes, as one, two and four ranks in turn."""
    meet = folder / "meet"
    meet.mkdir()
    reports = run_ranks(several, 4, meet, folder, phases(), timeout=280)
    return {name: [report[name] for report in reports if name in report] for name in reports[0]}


def whole_checkpoint(folder: Path, job: Job, step: int) -> dict[str, Any]:
    """What a job has saved, from a directory or a file."""
    path = folder / job.name / f"{step}.ckpt"
    if path.is_dir():
        convert_checkpoint(path, path.with_name(f"whole{step}.ckpt"))
        path = path.with_name(f"whole{step}.ckpt")
    return torch.load(path, weights_only=True)


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """Where two nestings are not alike: types, keys in their order, shapes, dtypes, and values up to rounding."""
    if type(found) is not type(expected):
        return [f"{place}: {type(found).__name__} instead of {type(expected).__name__}"]
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return [f"{place}: keys {list(found)} instead of {list(expected)}"]
        return [d for key in expected for d in differences(found[key], expected[key], f"{place}/{key}")]
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return [f"{place}: {len(found)} instead of {len(expected)}"]
        return [
            d for i, pair in enumerate(zip(found, expected, strict=True)) for d in differences(*pair, f"{place}/{i}")
        ]
    if isinstance(expected, Tensor):
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return [f"{place}: {found.shape} {found.dtype} instead of {expected.shape} {expected.dtype}"]
        off = (found - expected).double().norm() / expected.double().norm().clamp(min=1e-3)
        return [] if off <= RTOL else [f"{place}: off by {off:.1e}"]
    return [] if found == expected else [f"{place}: {found!r} instead of {expected!r}"]


def of_training(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """All but the callbacks, which hold names of files."""
    return {name: value for name, value in checkpoint.items() if name != "callbacks"}


@pytest.mark.ranks
@pytest.mark.parametrize("job", WRITE, ids=lambda job: job.name)
def test_a_checkpoint_is_the_plain_one(folder: Path, runs: Runs, job: Job) -> None:
    for step in (3, 6):
        found, expected = (whole_checkpoint(folder, j, step) for j in (job, PLAIN))
        assert differences(of_training(found), of_training(expected)) == []
        assert sorted(found["callbacks"]) == sorted(expected["callbacks"])
    assert found["state_dict"]["encoder.0.weight"].shape == (CASE.dim, N_FEATURES)
    adam, descent = (state["state"] for state in found["optimizer_states"])
    assert list(adam[0]) == ["step", "exp_avg", "exp_avg_sq"]
    assert not descent


@pytest.mark.ranks
@pytest.mark.parametrize("job", RESUME, ids=lambda job: job.name)
def test_training_goes_on_as_if_it_had_not_been_interrupted(folder: Path, runs: Runs, job: Job) -> None:
    one, whole = runs["plain"][0], whole_checkpoint(folder, PLAIN, 6)
    assert len(runs[job.name]) == KINDS[job.kind].ranks
    for found in runs[job.name]:
        assert found["losses"] == pytest.approx(one["losses"][3:], rel=RTOL)
        np.testing.assert_allclose(found["values"], one["values"], rtol=RTOL, atol=1e-12)
    again = whole_checkpoint(folder, job, 6)
    assert differences(of_training(again), of_training(whole)) == []


@pytest.mark.ranks
def test_only_the_rank_that_writes_keeps_whole_tensors_of_what_is_split(runs: Runs) -> None:
    assert [found["whole"] for found in runs["2 x 2"]] == [{True}, *[{False}] * 3]
    assert [found["whole"] for found in runs["ddp"]] == [{True}] * 2


@pytest.mark.ranks
def test_every_rank_writes_its_own_and_what_is_whole_is_written_once(folder: Path, runs: Runs) -> None:
    for kind in ("S2 in shards", "2 x 2 in shards"):
        metadata = FileSystemReader(folder / kind / "3.ckpt").read_metadata()
        chunks: dict[str, list[tuple[int, ...]]] = {}
        for index, info in metadata.storage_data.items():
            rank = int(info.relative_path.removeprefix("__").partition("_")[0])
            chunks.setdefault(index.fqn, []).append((rank, *index.offset))
        split = {key: sorted(found) for key, found in chunks.items() if len(found) > 1}
        states = [f"optimizer_states/0/state/2/{name}" for name in ("exp_avg", "exp_avg_sq")]
        halves = [(0, 0, 0), (1, 0, -(-N_FEATURES // 2))]
        names = [f"state_dict/{name}.0.weight" for name in ("encoder", "alias")]
        assert split == dict.fromkeys([*names, *states], halves)
        assert {found[0][0] for key, found in chunks.items() if key not in split} == {0}


@pytest.mark.ranks
def test_directories_are_chosen_replaced_and_removed_like_files(runs: Runs) -> None:
    first, second = runs["directories"]
    assert first["best"] == second["best"] == "epoch=1.ckpt"
    names = {Path(name).parts[1] for name in first["left"] if name.startswith("best")}
    assert names == {"epoch=1.ckpt", "last.ckpt"}
    for found in (first, second):
        # Lightning saves the last one when it saves the best one
        assert found["losses"]["last"] == found["losses"]["best"] == first["losses"]["best"]
        assert abs(found["losses"]["last"] - found["losses"][None]) > 0.1, "without loading, v is zero"
        assert "storage_options={'mode': 3}" in found["options"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("full", "failed on ranks {1: \"OSError(28, 'No space left on device')\"}. What was there before is unchanged"),
        ("piece", "a part of a tensor of shape (7, 3) into the checkpoint, outside of 'state_dict'"),
        ("no folder", "was not written: it failed with"),
        ("gap", "invalid fill tensor-volume"),
    ],
)
def test_what_cannot_be_written_is_told_to_every_rank_and_leaves_the_old(runs: Runs, case: str, text: str) -> None:
    for found in runs["directories"]:
        assert found["told"][case].startswith("DataError: ")
        assert text in found["told"][case]
        assert found["intact"]
        assert found["aside"] == []
        assert found["scattered"], "rows that do not follow each other come back in their places"


@pytest.fixture
def damaged(folder: Path, runs: Runs, tmp_path: Path) -> Path:
    return shutil.copytree(folder / "S2 in shards" / "3.ckpt", tmp_path / "damaged.ckpt")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def change_meta(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    meta = torch.load(path / "meta.pt", weights_only=True)
    change(meta)
    torch.save(meta, path / "meta.pt")


def of_another_shape(meta: dict[str, Any]) -> None:
    meta["state_dict"]["encoder.0.weight"] = torch.empty(3, 4, device="meta", dtype=torch.float64)


def forget_a_chunk(path: Path) -> None:
    metadata = FileSystemReader(path).read_metadata()
    metadata.state_dict_metadata["state_dict/encoder.0.weight"].chunks.pop()  # type: ignore[union-attr]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: (path / "meta.pt").unlink(), "has no file 'meta.pt' that can be read: FileNotFoundError"),
        (lambda path: (path / ".metadata").unlink(), "has no file '.metadata' that can be read: FileNotFound"),
        (lambda path: cut(path / "meta.pt"), "has no file 'meta.pt' that can be read: "),
        (lambda path: (path / "__1_0.distcp").unlink(), "has no file of the shard '__1_0.distcp', of which "),
        (lambda path: cut(path / "__1_0.distcp"), " bytes of the shard '__1_0.distcp', of which "),
        (lambda path: change_meta(path, of_another_shape), "as (3, 4) of torch.float64 in 'meta.pt', and in"),
        (
            lambda path: change_meta(path, lambda m: m["state_dict"].update(w=m["state_dict"]["v"])),
            "of torch.float64 in 'meta.pt', and in '.metadata' as None",
        ),
        (forget_a_chunk, "and in '.metadata' as TensorStorageMetadata("),
        (lambda path: change_meta(path, lambda m: m.pop("state_dict")), "another strategy has written it"),
    ],
)
def test_damaged_directories_are_refused(damaged: Path, damage: Callable[[Path], Any], text: str) -> None:
    open_directory(damaged)
    damage(damaged)
    with pytest.raises(DataError) as caught:
        fill(open_directory(damaged))
    assert text in str(caught.value)
    assert str(damaged) in str(caught.value)


@pytest.mark.ranks
def test_bytes_that_are_no_tensor_are_refused(damaged: Path, tmp_path: Path) -> None:
    shard = damaged / "__1_0.distcp"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    with pytest.raises(DataError, match=r"has shards of '.*' that cannot be read"):
        convert_checkpoint(damaged, tmp_path / "out.ckpt")
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.ranks
def test_the_command_converts(folder: Path, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.ckpt"
    assert main(["convert", str(damaged), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    plain = whole_checkpoint(folder, PLAIN, 3)
    assert differences(of_training(torch.load(out, weights_only=True)), of_training(plain)) == []
    assert main(["convert", str(damaged), "--out", str(out)]) == 2
    assert " exists; choose another name, or add --overwrite" in capsys.readouterr().err
    assert main(["convert", str(damaged), "--out", str(out), "--overwrite"]) == 0
    (damaged / "__1_0.distcp").unlink()
    before = out.read_bytes()
    assert main(["convert", str(damaged), "--out", str(out), "--overwrite"]) == 2
    assert "has no file of the shard" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged.ckpt", "out.ckpt"]


@pytest.mark.parametrize(
    ("directory", "out", "text"),
    [
        ("nothing", "out.ckpt", "found nothing; give a directory"),
        ("file", "out.ckpt", "found a file; give a directory"),
        (".", "nowhere/out.ckpt", "lies in a folder that does not exist"),
        (".", ".", "is a directory"),
        (".", "out.ckpt", "has no file 'meta.pt'"),
    ],
)
def test_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], directory: str, out: str, text: str
) -> None:
    (tmp_path / "file").touch()
    assert main(["convert", str(tmp_path / directory), "--out", str(tmp_path / out)]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.ranks
def test_values_stay_on_the_disk_until_they_are_asked_for(damaged: Path) -> None:
    state, _ = open_directory(damaged)["optimizer_states"]
    average = state["state"][0]["exp_avg"]
    assert isinstance(average, Stored)
    assert average.read().shape == average.shape


@pytest.mark.ranks
def test_a_file_takes_the_name_of_a_directory_or_leaves_it(damaged: Path) -> None:
    with pytest.raises(Exception, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"a": lambda: 1}, damaged)
    open_directory(damaged)
    # of a run that was killed
    shutil.copytree(damaged, damaged.with_name(".damaged.ckpt.previous"))
    AtomicCheckpointIO().save_checkpoint({"a": 1}, damaged)
    assert torch.load(damaged) == {"a": 1}
    assert [p.name for p in damaged.parent.iterdir()] == ["damaged.ckpt"]


@pytest.mark.ranks
def test_a_run_that_ended_between_two_renamings_is_told_where_the_old_one_is(damaged: Path) -> None:
    damaged.rename(damaged.with_name(".damaged.ckpt.previous"))
    with pytest.raises(DataError, match=r"one before is complete: rename .*\.damaged\.ckpt\.previous"):
        load_either(damaged, torch.load, weights_only=True)
