"""Claim: an unedited module trained as stages of a pipeline ends with the parameters of one process (float64, 1e-10),
logs, clips and returns the same, and every rank holds its own stage only.
"""

import warnings
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.errors import AmpError
from tests.any_module import make
from tests.each import all_pairs
from tests.lightning.pipeline.pipeline_cases import CNN, GPT, fit, trainer_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
}
SCHEDULES = ("gpipe", "1f1b", "interleaved")
Run = dict[str, Any]
EXAMPLES = {
    "evoformer": "",
    # a mean over what is hidden, of which every sample has as much
    "gene_transformer": "",
    "unet": "it has automatic_optimization=False",
    "cnn": "it has automatic_optimization=False",
}
"""What is said of the unedited modules; nothing of those that train."""
if find_spec("transformers"):
    EXAMPLES |= dict.fromkeys(("gpt2", "geneformer", "vit"), "")


def close(found: Run, expected: Run) -> None:
    for name, value in expected["state"].items():
        assert torch.allclose(found["state"][name], value, rtol=0, atol=1e-10), name
    assert found["logged"] == pytest.approx(expected["logged"], abs=1e-10)
    assert found["norms"] == pytest.approx(expected["norms"], abs=1e-10)
    for ours, theirs in zip(found["outputs"], expected["outputs"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[key], theirs[key], rtol=0, atol=1e-10) for key in theirs)


EVERY = list(product((GPT, CNN), SCHEDULES, OPTIONS))


def everything(rank: int, ranks: int, rows: list[Any]) -> dict[Any, Run]:
    found = {}
    for kind, schedule, name in rows:
        if schedule != "interleaved" or ranks == 2 or kind is CNN:
            settings = {"schedule": schedule, "micro_batches": 4}
            found[kind.__name__, schedule, name] = fit((rank, ranks), kind(), settings, OPTIONS[name])
    return found


def test_training_as_stages_is_training_on_one_process(tmp_path: Path) -> None:
    runs = run_ranks(everything, 2, tmp_path, all_pairs(EVERY), timeout=300)
    expected = {
        (kind.__name__, name): fit(None, kind(), {}, options)
        for kind in (GPT, CNN)
        for name, options in OPTIONS.items()
    }
    for found in runs:
        for (kind, _, name), run in found.items():
            close(run, expected[kind, name])


ATTEND = nn.functional.scaled_dot_product_attention


def attend(*args: Any, **kwargs: Any) -> Tensor:
    return ATTEND(*args, **kwargs | {"dropout_p": 0.0})


def any_module(
    rank: int | None, ranks: int, name: str, settings: dict[str, Any], options: dict[str, Any]
) -> tuple[str, Run]:
    """Some steps of an example, without dropout."""
    warnings.simplefilter("ignore")
    module, batch = make(name, **({"samples": 4, "side": 8} if name == "evoformer" else {}))
    module.double()
    batch = apply_to_collection(batch, Tensor, lambda x: x.double() if x.is_floating_point() else x)
    trainer = trainer_of(None if rank is None else (rank, ranks), settings, options)
    batches = [batch] * 2
    try:
        # layers of dropout call it too
        with (
            patch.object(nn.functional, "dropout", lambda x, *_, **__: x),
            patch.object(nn.functional, "scaled_dot_product_attention", attend),
        ):
            trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    except AmpError as error:
        return str(error), {}
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return "", {"state": module.state_dict(), "logged": logged, "norms": [], "outputs": []}


def examples(rank: int, ranks: int) -> dict[str, tuple[str, Run]]:
    return {name: any_module(rank, ranks, name, {"micro_batches": 3}, {}) for name in EXAMPLES}


@pytest.mark.full
def test_unedited_modules_train_as_on_one_process_or_are_refused(tmp_path: Path) -> None:
    for found in run_ranks(examples, 2, tmp_path, timeout=200):
        for name, told in EXAMPLES.items():
            said, run = found[name]
            assert told in said if told else not said, f"{name}: {said!r}"
            if not told:
                close(run, any_module(None, 1, name, {}, {})[1])
