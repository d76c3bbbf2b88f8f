"""Claim: techniques that meet on one module train what one process does, in float64, or are refused by both names."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp.errors import InstallError
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.data.batch_norm import share_batch_statistics
from lightning_amp.techniques.table import STRATEGIES
from tests.each import FEW
from tests.ranks import run_ranks
from tests.techniques.pair_cases import (
    CELLS,
    COMBINED,
    NAMES,
    STAGED,
    Zoo,
    attributes,
    pairs,
    pairs_in_stages,
    register,
    rules,
    staged,
    trained,
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("few", FEW)
def test_techniques_on_one_module_train_as_one_process(few: bool, tmp_path: Any) -> None:
    expected, _ = trained(None)
    every = run_ranks(pairs, 2, tmp_path, few, timeout=300)
    for names, *found in zip(COMBINED[few], *every, strict=True):
        where = f"{sorted(names)}"
        losses = sum(n * run["losses"] for n, run in zip(CELLS, found, strict=True)) / sum(CELLS)
        torch.testing.assert_close(losses, expected["losses"], **EXACT, msg=where)
        for run in found:
            assert run["warnings"] == [], where
            assert run["changed"] == [], where
            # in chunks a graph stands for the forward, which leaves no trace in Python
            in_graph = {"S6"} if "chunk" in names else set[str]()
            assert run["ran"] | in_graph & names == names - {"fsdp"}, where
            for key in ("gradients", "state"):
                torch.testing.assert_close(
                    run[key], expected[key], **EXACT, msg=lambda text, w=where, k=key: f"{w}, {k}: {text}"
                )


@pytest.mark.full
@pytest.mark.ranks
def test_techniques_on_blocks_of_stages_train_as_one_process_or_are_refused(tmp_path: Any) -> None:
    expected, _ = staged(None)
    for found in run_ranks(pairs_in_stages, 2, tmp_path, timeout=300):
        for names, run in zip(STAGED, found, strict=True):
            if isinstance(run, str):
                assert f"cannot be used with {names[0]}" in run
            else:
                torch.testing.assert_close(run, expected, **EXACT)
        assert [type(run) for run in found] == [dict] * 3 + [str] * 3


@pytest.fixture
def outside() -> Iterator[None]:
    """S6 and S7, of which this process knows nothing afterwards."""
    register()
    yield
    del STRATEGIES["S6"], STRATEGIES["S7"]


TWO_RANKS: Any = SimpleNamespace(size=lambda: 2)
REFUSED = [
    *(
        (
            [("chunk", kind)],
            rf"chunk and share_batch_statistics cannot be used together on '{NAMES[kind]}': chunk computes"
            rf" it, and ranks exchange the statistics of '{NAMES[kind]}{inside}'",
        )
        for kind, inside in {"1d": "", "2d": "", "3d": "", "untracked": "", "convolution": ".1"}.items()
    ),
    ([("S7", "1d")], r"S7 and share_batch_statistics cannot be used together on 'blocks\.0': S7 computes it"),
    ([("S7", "frozen")], r"S7 and share_batch_statistics cannot be used together on 'blocks\.4'"),
    ([("chunk", "tied"), ("S7", "tied")], r"S7 and chunk are both to compute 'blocks\.11' \(Linear\)"),
    ([("S7", "tied"), ("S6", "tied")], r"S6 cannot replace .*'blocks\.11' is set on the instance by S7"),
]


def install_both(module: Zoo, asked: Any) -> None:
    installed = install_rules(module, [rule for name, kind in asked for rule in rules(name, module, [kind])])
    try:
        share_batch_statistics(module, TWO_RANKS)
    finally:
        installed.undo()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(("asked", "why"), REFUSED)
def test_techniques_that_cannot_meet_are_refused_by_both_names(asked: Any, why: str) -> None:
    module = Zoo(0)
    before = attributes(module)
    with pytest.raises(InstallError, match=why):
        install_both(module, asked)
    assert attributes(module) == before


@pytest.mark.usefixtures("outside")
def test_a_module_with_a_forward_of_its_own_is_not_replaced() -> None:
    """A shallow copy would run what is set on the module that it is a copy of."""
    module = Zoo(0)
    layer = module.blocks[11]
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)
    with pytest.raises(InstallError, match=r"S6 cannot replace 'blocks\.11'.*by <function"):
        install_rules(module, rules("S6", module, ["tied"]))
    assert type(module.blocks[11]) is nn.Linear
