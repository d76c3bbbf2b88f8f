"""Claim: techniques override a module's forward in one order whatever the order in which they come, one in each
position; copies run their own parameters, and the module is in the end what it was.
"""

import copy
import io
import logging
import shutil
import sys
import threading
import warnings
from collections import defaultdict
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_amp.errors import InstallError
from lightning_amp.footprint.copies.no_side_effects import without_side_effects
from lightning_amp.footprint.forward_overrides import (
    Override,
    Position,
    add_override,
    overrides_of,
    remove_override,
    set_overrides,
)

X = torch.ones(1, 3)


class Keeps(nn.Linear):
    """Lets nobody set an attribute by setattr."""

    def __setattr__(self, name: str, value: Any) -> None:
        assert name != "forward"
        super().__setattr__(name, value)


def instead(module: nn.Module, x: Tensor) -> Tensor:
    return -type(module).forward(module, x)


def around(factor: int, inside: Any, module: nn.Module, x: Tensor) -> Tensor:
    return factor * inside(module, x) + 1


OVERRIDES = [
    Override("S6", instead),
    Override("recompute", partial(around, 2), Position.TWICE),
    Override("pipeline", partial(around, 3), Position.STAGE),
]


def test_overrides_run_in_their_order_and_leave_nothing() -> None:
    for order in permutations(OVERRIDES):
        layer = Keeps(3, 2)
        plain, before = layer(X), dict(vars(layer))
        for one in order:
            add_override("layer", layer, one)
        assert torch.equal(layer(X), 3 * (2 * -plain + 1) + 1)
        remove_override(layer, OVERRIDES[1])
        assert torch.equal(layer(X), 3 * -plain + 1)
        for one in order:
            remove_override(layer, one)
        assert [*vars(layer).items()] == [*before.items()]


def test_two_techniques_that_compute_one_module_are_refused_by_name() -> None:
    layer = nn.Linear(3, 2)
    add_override("net.0", layer, OVERRIDES[0])
    with pytest.raises(InstallError, match=r"S6 and S7 are both to compute 'net\.0' \(Linear\)"):
        add_override("net.0", layer, Override("S7", instead))
    assert overrides_of(layer) == (OVERRIDES[0],)
    # a forward that something else has set is refused and kept
    layer = nn.Linear(3, 2)
    layer.forward = theirs = partial(instead, layer)  # type: ignore[method-assign]
    assert overrides_of(layer) is None
    with pytest.raises(InstallError, match="S6 cannot change how 'a' runs, whose `forward` is set on the"):
        add_override("a", layer, OVERRIDES[0])
    assert layer.forward is theirs


def test_copies_run_their_own_parameters() -> None:
    layer = nn.Linear(3, 2)
    for one in OVERRIDES:
        add_override("", layer, one)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    shallow = copy.copy(layer)
    shallow._parameters = {name: nn.Parameter(p.detach().clone()) for name, p in layer.named_parameters()}
    set_overrides(shallow, OVERRIDES)
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False), shallow):
        assert torch.equal(twin(X), layer(X))
        with torch.no_grad():
            twin.weight.zero_()
        assert not torch.equal(twin(X), layer(X))


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
        with pytest.raises(ZeroDivisionError) if fails else without_side_effects(), without_side_effects(counts):
            counts()
            assert state() != before
            1 / (not fails)
        assert state() == before


def test_what_is_written_is_read_again_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    with without_side_effects():
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

    with without_side_effects():
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
        with without_side_effects():
            warn("said before")
            warn("said by a guest")
        warn("said before")
        warn("said by a guest")
    assert [str(one.message) for one in warned] == ["said before", "said by a guest"]
