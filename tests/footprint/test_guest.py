"""Claim: what a guest writes, says and changes is there for the guest alone; other threads go on as they did."""

import logging
import shutil
import sys
import threading
import warnings
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_amp.footprint.copies.guest import as_guest

CALLS: dict[str, list[int]] = defaultdict(list)
N_CALLS = 0


@cache
def cached(n: int) -> int:
    return n


class Counts:
    """Somebody's object."""

    n_calls = 0
    names: list[str] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.own, self.generator = {"calls": [0]}, np.random.default_rng(1)


COUNTS = Counts()


def counts(hidden: list[int] = []) -> None:  # noqa: B006
    global N_CALLS
    N_CALLS += 1
    CALLS["counts"].append(1)
    CALLS["more"].append(1)
    Counts.n_calls += 1
    Counts.names.append("x")
    COUNTS.own["calls"].append(2)
    COUNTS.generator.random()
    COUNTS.new = 1  # type: ignore[attr-defined]
    hidden.append(1)
    cached(1)


def state() -> Any:
    drawn = COUNTS.generator.bit_generator.state["state"]["state"]
    given = counts.__defaults__, cached.cache_info().currsize
    return repr((N_CALLS, dict(CALLS), Counts.n_calls, Counts.names, COUNTS.own, drawn, vars(COUNTS).keys(), given))


def test_files_of_a_function_are_as_before() -> None:
    CALLS["counts"].append(1)
    before = state()
    for fails in (False, True):
        with pytest.raises(ZeroDivisionError) if fails else as_guest(), as_guest(counts):
            counts()
            assert state() != before
            1 / (not fails)
        assert state() == before


def test_what_is_written_is_read_again_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    with as_guest():
        (tmp_path / "a" / "b").mkdir(parents=True)
        (tmp_path / "a" / "text").write_text("ä")
        with (tmp_path / "old").open("a") as file:
            file.write("new")
        torch.save({"x": torch.ones(2)}, tmp_path / "tensors")
        np.save(tmp_path / "array.npy", np.arange(3))
        shutil.rmtree(tmp_path)
        (tmp_path / "old").unlink()
        (tmp_path / "old").rename(tmp_path / "other")
        assert (tmp_path / "a" / "text").read_text() == "ä"
        assert torch.load(tmp_path / "tensors")["x"].tolist() == [1, 1]
        assert np.load(tmp_path / "array.npy").tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "old"


def test_other_threads_write_and_speak(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    def speak(who: str) -> None:
        print(who)
        sys.stderr.write(who)
        logging.getLogger("x").warning(who)
        (tmp_path / who).mkdir()
        (tmp_path / who / "file").write_text(who)

    with as_guest():
        speak("guest")
        other = threading.Thread(target=speak, args=("other",))
        other.start()
        other.join()
    assert capsys.readouterr() == ("other\n", "other")
    assert caplog.messages == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert (tmp_path / "other" / "file").read_text() == "other"


def test_a_warning_that_is_given_once_in_a_place_is_as_before() -> None:
    def warn(text: str) -> None:
        warnings.warn(text, stacklevel=1)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        warn("said before")
        with as_guest():
            warn("said before")
            warn("said by a guest")
        warn("said before")
        warn("said by a guest")
    assert [str(one.message) for one in warned] == ["said before", "said by a guest"]
