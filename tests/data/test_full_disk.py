"""Claim: a disk that is full or read-only costs one message and status 2, whichever command meets it and wherever in
its files; nothing half-written is left, what was there before is untouched, and no process crashes.
"""

import errno
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anndata
import cooler
import h5py
import numpy as np
import pandas as pd
import pytest
import torch

from lightning_amp.cli.main import main
from lightning_amp.data.files import new_hdf5 as module
from lightning_amp.data.files.new_hdf5 import new_hdf5, write_scool
from lightning_amp.data.files.write_results import write_embedding
from lightning_amp.data.prepare.prepare import prepare
from lightning_amp.errors import DataError
from lightning_amp.verification.training_run import _keep
from tests.data.tiny_data import Files, make_bins, make_pixels, write_all
from tests.data.tiny_data import write_scool as cooler_writes

FULL = OSError(errno.ENOSPC, "No space left on device")
LIMITED = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from lightning_amp.cli.main import main
sys.exit(main())
"""


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return write_all(tmp_path)


def limited(limit: int, words: list[Any], **options: Any) -> "subprocess.CompletedProcess[str]":
    """A command that may write no file beyond a number of bytes, as on a disk that runs full."""
    # -B: Python would put a compiled module of its first bytes into place, and every later import would fail
    command = [sys.executable, "-B", "-W", "ignore", "-c", LIMITED, str(limit), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, **options)


def is_one_message(ran: "subprocess.CompletedProcess[str]") -> bool:
    lines = ran.stderr.splitlines()
    return ran.returncode == 2 and len(lines) == 1 and lines[0].startswith("lightning-amp: error: ")


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@contextmanager
def file_limit(n_bytes: int) -> Iterator[None]:
    before, compiled = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = compiled


# from the first byte to the last ones of the largest file, which has 119 kB
@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("limit", [100, 110_000])
def test_prepare_leaves_nothing_and_does_not_crash(files: Files, limit: int) -> None:
    bins = make_bins({"chr1": 60, "chr2": 40})
    cooler_writes(files.hic, {f"c{i}": make_pixels(i, 100, 4000) for i in range(100)}, bins)
    before = names_in(files.out.parent)
    words = [word for name, value in files.arguments().items() for word in (f"--{name}", value)]
    ran = limited(limit, ["prepare", *words])
    assert is_one_message(ran), (ran.returncode, ran.stderr[-2000:])
    assert f"cannot write {str(files.out)!r}: File too large; up to " in ran.stderr
    assert re.search(r"up to [\d.]+ [KM]iB are needed, .* are free: make room or choose", ran.stderr)
    assert "Nothing half-written is left" in ran.stderr
    assert names_in(files.out.parent) == before


def test_prepare_keeps_what_it_was_to_replace(files: Files) -> None:
    prepare(**files.arguments())
    before = {name: (files.out / name).stat() for name in names_in(files.out)}
    with pytest.raises(DataError, match="what was there before is untouched"), file_limit(5000):
        prepare(**files.arguments(), overwrite=True)
    assert {name: (files.out / name).stat() for name in names_in(files.out)} == before


@pytest.mark.parametrize("n_bytes", [0, 5000, 799_000])
def test_hdf5_is_written_in_full_or_raises_and_closes(tmp_path: Path, n_bytes: int) -> None:
    values = np.random.default_rng(0).random(200_000, dtype=np.float32)

    def write(path: Path) -> None:
        with new_hdf5(path) as (file, check):
            rows = file.create_dataset("x", shape=(0,), maxshape=(None,), dtype="f4", chunks=(4096,))
            for start in range(0, len(values), 5000):
                rows.resize((start + 5000,))
                rows[start:] = values[start : start + 5000]
                assert (rows[start:] == values[start : start + 5000]).all()
                check()

    with pytest.raises(OSError, match="File too large"), file_limit(n_bytes):
        write(tmp_path / "x.h5")
    write(tmp_path / "y.h5")
    with h5py.File(tmp_path / "y.h5") as file:
        np.testing.assert_array_equal(file["x"][:], values)


def test_after_an_error_little_is_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    close = module._Patient.__exit__

    def noted(self: Any, *error: object) -> None:
        kept.append(sum(len(data) for _, data in self._later))
        close(self, *error)

    monkeypatch.setattr(module._Patient, "__exit__", noted)
    pixels = make_pixels(0, 100, 4000)
    cells = ((f"c{i}", pixels) for i in range(10_000))
    with pytest.raises(OSError, match="File too large"), file_limit(300_000):
        write_scool(tmp_path / "x.scool", make_bins({"1": 100}), cells, n_cells=10_000)
    assert 0 < kept[0] < 2_000_000


def test_a_scool_is_what_cooler_would_write(tmp_path: Path) -> None:
    bins = make_bins()
    cells = {f"c {i}": make_pixels(i).astype({"count": float}) for i in range(3)}
    cooler.create_scool(str(tmp_path / "theirs"), bins, cells, dtypes={"count": float}, ordered=True)
    write_scool(tmp_path / "ours", bins, cells.items(), n_cells=3)
    assert cooler.fileops.list_scool_cells(str(tmp_path / "ours")) == [f"/cells/c {i}" for i in range(3)]
    own = {"creation-date", "generated-by"}
    with h5py.File(tmp_path / "theirs") as theirs, h5py.File(tmp_path / "ours") as ours:
        seen: list[str] = []

        def compare(name: str, wanted: Any) -> None:
            found = ours[name]
            assert {k: v for k, v in found.attrs.items() if k not in own} == {
                k: v for k, v in wanted.attrs.items() if k not in own
            }
            if isinstance(wanted, h5py.Dataset):
                assert found.dtype == wanted.dtype
                assert h5py.check_enum_dtype(found.dtype) == h5py.check_enum_dtype(wanted.dtype)
                np.testing.assert_array_equal(found[:], wanted[:])
                seen.append(name)

        compare("/", theirs)
        theirs.visititems(compare)
        assert len(seen) >= 5 + 3 * 5
        assert ours["cells/c 1/bins/start"] == ours["bins/start"]
    uneven = bins.assign(end=bins["end"] + (bins.index == 3) * 7)
    write_scool(tmp_path / "uneven", uneven, {"a": cells["c 0"]}.items(), n_cells=1)
    assert cooler.Cooler(f"{tmp_path / 'uneven'}::/cells/a").info["bin-type"] == "variable"


def test_embeddings_are_written_in_full_or_not_at_all(tmp_path: Path) -> None:
    obs = pd.DataFrame({"celltype": pd.Categorical(["a", "b"] * 500)}, index=[f"c{i}" for i in range(1000)])
    embedding = np.random.default_rng(0).random((1000, 8), dtype=np.float32)
    path = tmp_path / "e.h5ad"
    with pytest.raises(DataError, match="make room"), file_limit(9000):
        write_embedding(path, obs=obs, parts={"obsm": {"X_amp": embedding}})
    assert names_in(tmp_path) == []
    write_embedding(path, obs=obs, parts={"obsm": {"X_amp": embedding}})
    found = anndata.read_h5ad(path)
    assert found.shape == (1000, 0)
    pd.testing.assert_frame_equal(found.obs, obs)
    np.testing.assert_array_equal(found.obsm["X_amp"], embedding)


@pytest.mark.parametrize("verb", ["fit", "predict"])
def test_a_full_disk_under_any_layer_of_training(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(words: list[str]) -> None:
        try:
            raise FULL
        except OSError as error:
            raise RuntimeError("unexpected pos 64 vs 0") from error

    monkeypatch.setattr("lightning_amp.cli.commands.train.train", train)
    assert main([verb]) == 2
    found = capsys.readouterr().err
    assert found.startswith("lightning-amp: error: cannot write a file: No space left on device;")
    assert found.count("\n") == 1


def test_what_verify_keeps_for_the_ranks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot write .*one.pt'.*TMPDIR says"), file_limit(2000):
        _keep([torch.zeros(5000)], tmp_path / "one.pt")
    assert names_in(tmp_path) == []
    _keep([torch.arange(5000)], tmp_path / "one.pt")
    assert torch.equal(torch.load(tmp_path / "one.pt")[0], torch.arange(5000))


def test_a_read_only_disk_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("lightning_amp.simulation.calibrate.calibrate", None)
    assert main(["calibrate", "--out", "r.json"]) == 2
    assert "--out 'r.json' cannot be written" in capsys.readouterr().err
