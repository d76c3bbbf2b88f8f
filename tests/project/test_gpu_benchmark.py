"""Claim: the command for a device runs all its parts on a CPU too, tells what is wrong, and keeps what was written."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import exactness, several_ranks
from benchmarks.gpu.__main__ import PARTS, SECONDS
from benchmarks.gpu.device import FLOAT32, FLOAT64, PRECISIONS
from benchmarks.gpu.exactness import FORMS, _row, decoders
from benchmarks.gpu.rates import FILE as RATES
from benchmarks.gpu.report import FILE as REPORT
from benchmarks.gpu.runner import Clock, Part, Record, Runner, Work, read, share
from benchmarks.page import ROOT
from lightning_amp.costs.device_rates import Rates
from lightning_amp.techniques.hic.attention.install import ChunkedLocalAttention, FusedLocalAttention
from lightning_amp.techniques.table import STRATEGIES
from lightning_amp.verification.compare import Record as Recorded

MOST_FILES, MOST_BYTES = 8, 16 * 2**20
BUSY = "something else keeps it busy"
SCRIPT = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu import runner
from benchmarks.gpu.report import write_report
from benchmarks.gpu.runner import Part, Runner, SkipPart

def wrong(work): raise ValueError("out of luck")
def hang(work): work.record.row(before=1); time.sleep(100)
def die(work): os.kill(os.getpid(), 9)
def leave(work): raise SkipPart("nothing to do here")
def fine(work): work.record.row(n=2); work.record.note("as it should be")
def cuda(work):
    if "__mp_main__" not in sys.modules:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")
    work.record.row(spawned=True)

if __name__ == "__main__":
    runner.GRACE_S = 0.5
    out = Path(sys.argv[1])
    seconds = {wrong: 1, hang: 1, die: 1, leave: 1, fine: 1, cuda: 60}
    parts = [Part(name=f.__name__, title=f.__name__, file="all", seconds=n, run=f) for f, n in seconds.items()]
    after = lambda: write_report(out, parts, device="cpu", tiny=True)
    parts_of = Runner(out, device="cpu", tiny=True, seconds=sum(seconds.values()) + 1, after=after)
    sys.exit(0 if parts_of.run(parts) else 1)
"""


def start(*words: object) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # where the tests were started in the background, an interrupt is ignored by them and by what they start
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=heard, **pipes)


@pytest.mark.exhaustive
@pytest.mark.release
def test_every_part_runs_on_a_cpu(tmp_path):
    process = start("-m", "benchmarks.gpu", "--out", tmp_path, "--tiny", "--device", "cpu")
    printed, _ = process.communicate(timeout=560)
    assert process.returncode == 0, printed
    entries = {part.name: read(tmp_path / f"{part.file}.json")[part.name] for part in PARTS}
    busy = entries["calibrate"]["error"]
    # rates are fitted on an idle machine only, which tests side by side are not
    wanted = dict.fromkeys(entries, "ok") | ({"calibrate": "skipped"} if BUSY in busy else {})
    # torch keeps a history of allocations on CUDA only, and reserves memory
    wanted["at_peak"] = wanted["reserved"] = "skipped"
    # and holds a budget there only
    wanted["budget"] = "skipped"
    assert {name: entry["status"] for name, entry in entries.items()} == wanted
    silent = [name for name, entry in entries.items() if not entry["rows"] and wanted[name] == "ok"]
    assert not silent
    files = list(tmp_path.iterdir())
    assert len(files) <= MOST_FILES
    assert all(file.stat().st_size <= MOST_BYTES for file in files)
    assert all(f"## {part.title}" in (tmp_path / REPORT).read_text() for part in PARTS)
    if wanted["calibrate"] == "ok":
        assert Rates.read(tmp_path / RATES).device.endswith("calibrated")
    assert len(entries["memory"]["rows"]) == 14
    assert {row["precision"] for row in entries["exactness"]["rows"]} == {p.name for p in PRECISIONS}


@pytest.mark.ranks
def test_a_part_that_fails_hangs_or_dies_keeps_no_other_from_running(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    process = start(tmp_path / "script.py", tmp_path)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1, printed
    found = json.loads((tmp_path / "all.json").read_text())
    assert {name: entry["status"] for name, entry in found.items()} == {
        "wrong": "failed",
        "hang": "failed",
        "die": "failed",
        "leave": "skipped",
        "fine": "ok",
        "cuda": "ok",
    }
    assert found["wrong"]["error"] == "ValueError: out of luck"
    assert any("in wrong" in line for line in found["wrong"]["facts"]["traceback"])
    # it had what the first one has left
    assert "ended after its 2 s" in found["hang"]["error"]
    assert found["hang"]["rows"] == [{"before": 1}]
    assert "ended with -9" in found["die"]["error"]
    assert found["cuda"]["rows"] == [{"spawned": True}]
    text = (tmp_path / REPORT).read_text()
    assert "| fine | ok |" in text
    assert "as it should be" in text
    assert "nothing to do here" in text


@pytest.mark.parametrize(
    ("left", "own", "later", "seconds"),
    # its own; with what is left over; where the time is short; where none is left
    [(100, 10, 90, 10), (100, 10, 60, 40), (50, 10, 90, 10), (5, 10, 0, 5), (-1, 10, 0, -1)],
)
def test_a_part_has_its_share_and_what_those_before_have_left(left, own, later, seconds):
    assert share(left, own, later) == seconds


def test_shares_are_the_time_of_all_parts():
    assert sum(part.seconds for part in PARTS) == SECONDS


def test_a_part_without_time_is_told(tmp_path, capsys):
    part = Part(name="late", title="Late", file="all", seconds=5, run=lambda work: None)
    assert not Runner(tmp_path, device="cpu", tiny=True, seconds=1, after=lambda: None).run([part])
    assert read(tmp_path / "all.json")["late"]["status"] == "skipped"
    assert "skipped no time was left for it" in capsys.readouterr().out


def test_exactness_covers_every_technique_of_one_device():
    of_decoder = {name: info for name, info in STRATEGIES.items() if info.choice or name == "S1"}
    one_device = {name for name, info in of_decoder.items() if not info.model_axis}
    assert {name for form in FORMS for name in form.strategies} == one_device
    kinds = [shape for _, shape in decoders(tiny=False)]
    assert {(shape.attention, shape.variant, shape.chained) for shape in kinds} == {
        (True, "higlue", False),
        (True, "paper", True),
        (False, "higlue", False),
    }


@pytest.mark.parametrize(
    ("precision", "off", "plain", "wrong"),
    [
        (FLOAT64, 1e-9, 0.0, 1),
        (FLOAT64, 1e-11, 0.0, 0),
        (FLOAT32, 1e-2, 1e-6, 1),
        (FLOAT32, 1e-2, 5e-3, 0),
        (FLOAT32, float("nan"), 1e-6, 1),
    ],
)
def test_a_gradient_off_by_more_than_rounding_is_wrong(tmp_path, precision, off, plain, wrong):
    record = Record(tmp_path / "checks.json", "exactness")
    record.begin()
    expected = {"loss": torch.tensor(2.0).double(), "u": torch.ones(3).double()}
    found = {"loss": expected["loss"], "u": expected["u"] * (1 + off)}
    values = found, expected
    assert _row(SimpleNamespace(record=record), "d", "f", precision, values, plain)[1] == wrong
    assert record.entry["rows"][0]["answer"] == ("**wrong**" if wrong else "exact")


@pytest.mark.parametrize(
    ("precision", "off", "of_one", "answer"),
    [
        ("64-true", 1e-9, 0.0, "**wrong**"),
        ("64-true", 1e-11, 0.0, "exact"),
        ("64-true", float("nan"), 0.0, "**wrong**"),
        ("bf16-mixed", 4e-2, 1e-2, "**wrong**"),
        ("bf16-mixed", 2.5e-2, 1e-2, "exact"),
        ("64-true", None, 0.0, "**failed**"),
    ],
)
def test_ranks_that_differ_from_one_process_are_told(tmp_path, monkeypatch, precision, off, of_one, answer):
    def trained(off):
        values = {"w": torch.ones(3).double() * (1 + off)}
        recorded = Recorded(losses=[[2.0], [1.0]], gradients=values, parameters={"w": torch.ones(3).double()})
        return several_ranks.Trained(recorded)

    def run_ranks(*args, **options):
        if off is None:
            pytest.fail("rank 1 failed: no such kernel")
        # the second rank alone is off
        return [trained(0.0), trained(off)._replace(data_rank=1)]

    monkeypatch.setattr(several_ranks, "run_ranks", run_ranks)
    record = Record(tmp_path / "checks.json", "several_ranks")
    record.begin()
    work = Work(record=record, device=torch.device("cpu"), tiny=True, clock=Clock(60.0), out=tmp_path)
    case = several_ranks.Case("S1")
    right = several_ranks._row(work, tmp_path, 2, case, precision, trained(0.0), trained(of_one))
    assert right == (answer == "exact")
    assert record.entry["rows"][0]["answer"] == answer


def test_a_technique_that_is_wrong_or_fails_is_told_beside_the_others(tmp_path, monkeypatch):
    forward = FusedLocalAttention.forward

    def scaled(self, *rows):
        # small examples, by which attention is detected, are right
        return forward(self, *rows) * (1 + 1e-3 * (self.window > 3))

    def fails(self, *rows):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(FusedLocalAttention, "forward", scaled)
    monkeypatch.setattr(ChunkedLocalAttention, "forward", fails)
    monkeypatch.setattr(exactness, "PRECISIONS", (FLOAT64,))
    monkeypatch.setattr(exactness, "decoders", lambda tiny: list(decoders(tiny=tiny))[:1])
    record = Record(tmp_path / "checks.json", "exactness")
    record.begin()
    work = Work(record=record, device=torch.device("cpu"), tiny=True, clock=Clock(60.0), out=tmp_path)
    with pytest.raises(AssertionError, match="have failed, or are wrong"):
        exactness.run(work)
    rows = record.entry["rows"]
    assert {row["form"] for row in rows if row["answer"] == "**wrong**"} == {
        *(str(form) for form in FORMS if {"fused", "sdpa"} & {*form.strategies})
    }
    failed = [row for row in rows if row["answer"] == "**failed**"]
    assert {row["form"] for row in failed} == {str(form) for form in FORMS if "S3" in form.strategies}
    assert {row["of"] for row in failed} == {"RuntimeError: no such kernel"}
