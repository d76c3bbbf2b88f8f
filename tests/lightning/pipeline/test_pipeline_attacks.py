"""Claim: a batch that is not cut may have any loss; settings that a pipeline cannot have are refused; batches are cut
by samples. Unusual modules in stages are rows of tests/odd_modules.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from lightning_amp.data.cut_batch import cut
from lightning_amp.errors import DataError
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.steps.pipelined_steps import PipelinedSteps
from tests.odd_modules.collection.on_ranks import judged_together, on_rank
from tests.odd_modules.collection.run import trained
from tests.odd_modules.collection.stages import Takes
from tests.odd_modules.collection.tables import ROWS
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
MASKED = "a loss that leaves samples out"
UNCUT: list[tuple[list[str], dict[str, Any]]] = [
    ([MASKED], {"micro_batches": 1}),
    ([MASKED, "a sum over samples", "every sample among the others", "a metric that is reset"], {"schedule": "gpipe"}),
]
"""Any loss, computed for the whole batch."""
SETTINGS: dict[str, dict[str, Any]] = {
    "check_finite=True": {"check_finite": True},
    "save_distributed_checkpoint=True": {"save_distributed_checkpoint": True},
    "rounds of unequal length": {"schedule": "interleaved", "micro_batches": 5},
}


@pytest.mark.full
def test_a_batch_that_is_not_cut_may_have_any_loss(tmp_path: Path) -> None:
    run = partial(run_ranks, on_rank, 2, tmp_path)
    for k, (names, options) in enumerate(UNCUT):
        (folder := tmp_path / str(k)).mkdir()
        found = run(folder, names, {"strategies": "pipeline"} | options, 1)
        for name in names:
            assert not judged_together(name, "uncut", [one[name] for one in found], trained(ROWS[name]), 1), name


@pytest.mark.full
def test_what_a_pipeline_cannot_have_is_refused(tmp_path: Path) -> None:
    for k, (words, settings) in enumerate(SETTINGS.items()):
        (folder := tmp_path / str(k)).mkdir()
        options = {"strategies": "pipeline", "micro_batches": 3} | settings
        said = [
            one["a list of blocks"] for one in run_ranks(on_rank, 2, tmp_path, folder, ["a list of blocks"], options, 1)
        ]
        assert all(isinstance(one, str) for one in said), words
        assert any(words in one for one in said), said


def test_batches_without_a_number_draw_anew() -> None:
    seeds, module = list[int](), Takes()
    trainer: Any = Mock(current_epoch=0)
    module.trainer = trainer
    with patch.object(
        PipelinedSteps, "_train", lambda self, _, name, *given: seeds.append(self._seed(name, given[1:], 0))
    ):
        stages: Any = Mock(spans=(), forward_only=())
        steps = PipelinedSteps(module, {}, stages, Mock(), PipelineStages(), data_rank=0)
        for trainer.current_epoch in (0, 0, 1):
            module.training_step({})
        steps.undo()
    assert len({*seeds}) == 3


@dataclass
class Named:
    x: Tensor
    names: list[Any]


def test_a_batch_is_cut_by_samples_or_refused() -> None:
    parts, sizes = cut({"x": torch.arange(7), "scale": torch.tensor(2.0), "name": "a"}, 3)
    assert sizes == [2, 2, 3]
    assert [len(part["x"]) for part in parts] == sizes
    assert all(part["scale"] == 2.0 and part["name"] == "a" for part in parts)
    assert cut([torch.arange(2)], 5)[1] == [1, 1]
    (first, _), _ = cut(Named(torch.arange(7), [torch.tensor(1), "a"]), 2)
    assert (len(first.x), first.names) == (3, [1, "a"])
    for odd in (
        {"x": torch.arange(7), "edges": torch.ones(2, 9)},
        {"x": torch.arange(7), "names": list("abcdefg")},
        Named(torch.arange(7), list("abcdefg")),
        Named(torch.arange(7), list(torch.arange(7))),
        {"x": torch.arange(7), "graph": object()},
        {"scale": torch.tensor(2.0)},
    ):
        with pytest.raises(DataError, match="micro-batches"):
            cut(odd, 3)
