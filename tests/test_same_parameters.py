"""Claim: parameters that ranks should have in common and have not are told, with the ranks, before a validation, in a
save and at the end; rounding, shards of the model axis and what is nan everywhere are not told.
"""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_amp.lightning.same_parameters import warn_of_differences
from lightning_amp.lightning.strategy import AMPStrategy
from tests.model_axis_cases import Batch, Maps, loader_of, trainer_of
from tests.ranks import run_ranks

KINDS: dict[str, Tensor] = {
    "a": torch.tensor([[1.0, -4.0], [0.5, 2.0]]),
    "bf16": torch.tensor([1.0, -4.0]).bfloat16(),
    "integer": torch.tensor([1, -4]),
    "complex": torch.tensor([1.0 + 1j, -4.0]),
    "scalar": torch.tensor(4.0, dtype=torch.float64),
    "turned": torch.tensor([[1.0, -4.0, 3.0], [0.5, 2.0, 3.0]]).T,
    "nothing": torch.ones(0, 3),
    "nan": torch.tensor([torch.nan, 4.0]),
    "infinite": torch.tensor([torch.inf, 4.0]),
    "shard": torch.ones(2),
}


def looks(rank: int, ranks: int) -> dict[str, str]:
    """What rank 0 says of a 2 x 2 mesh, by case; a case changes the first entry of one parameter on one rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    # by how much, on which rank, of which parameter
    cases: dict[str, list[tuple[float, int, str]]] = {"as they were": []}
    for name in set(KINDS) - {"nothing", "shard", "nan", "infinite"}:
        cases[name] = [(1.0, 3, name)]
    cases |= {
        "rounding": [(1e-7, 3, "a"), (3e-6, 2, "scalar"), (2**-7, 1, "bf16")],
        "two": [(1.0, 3, "a"), (0.5, 1, "a"), (2.0, 2, "scalar")],
        "the first": [(1.0, 0, "a")],
        "shard of another data rank": [(1.0, 3, "shard")],
        "nan on one": [(torch.nan, 2, "a")],
        "finite on one": [(-torch.inf, 2, "infinite")],
    }
    found = {}
    for case, changes in cases.items():
        held = {
            name: nn.Parameter(value.clone(), requires_grad=value.is_floating_point())
            for name, value in KINDS.items()
        }
        held["shard"].data += rank % 2
        for by, where, name in changes:
            if rank == where:
                value = held[name].data
                value[(0,) * value.dim()] += torch.tensor(by, dtype=value.dtype)
        module = nn.Module()
        for name, parameter in held.items():
            module.register_parameter(name, parameter)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warn_of_differences(module, [held["shard"]], mesh, step=7)
        found[case] = "".join(str(w.message) for w in told)
    return found


def test_what_differs_is_named_with_its_ranks(tmp_path: Path) -> None:
    first, *others = run_ranks(looks, 4, tmp_path)
    assert not any(text for other in others for text in other.values()), "rank 0 says it"
    assert first.pop("as they were") == first.pop("rounding") == ""
    assert all(text.startswith("after step 7, ") for text in first.values())
    for name in ("a", "bf16", "integer", "complex", "scalar", "turned"):
        assert f"'{name}' by 2.5e-01, on ranks [3]" in first[name]
    assert "'scalar' by 5.0e-01, on ranks [2]; 'a' by 2.5e-01, on ranks [1, 3]." in first["two"]
    assert "'a' by 2.5e-01, on ranks [1, 2, 3]" in first["the first"]
    assert "'shard' by 5.0e-01, on ranks [3]" in first["shard of another data rank"]
    assert "'a' by nan, on ranks [2]" in first["nan on one"]
    assert "'infinite' by nan, on ranks [2]" in first["finite on one"]


ALSO = ("validates", "saves", "nothing")


class ByHand(Maps):
    """Clips gradients by a norm that it takes by itself."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        found = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        norm = strategy.gradient_norm() if self.asks else found
        nn.utils.clip_grads_with_norm_(self.parameters(), 0.1, norm)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(rank: int, ranks: int, folder: Path) -> dict[tuple[bool, str], set[str]]:
    """Warnings by whether the module asks the strategy for the norm, and what else the run does."""
    found = {}
    for asks in (True, False):
        for also in ALSO:
            trainer = trainer_of(
                rank,
                ranks,
                AMPStrategy(strategies="S2", model_parallel_size=ranks),
                max_epochs=1,
                default_root_dir=folder,
                enable_checkpointing=also == "saves",
                limit_val_batches=1 if also == "validates" else 0,
            )
            loader = partial(loader_of, rank, ranks)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                trainer.fit(ByHand(asks), loader(), loader() if also == "validates" else None)
            texts = (str(w.message) for w in told)
            found[asks, also] = {text for text in texts if "differ between ranks" in text}
    return found


def test_a_norm_taken_by_hand_is_told_and_the_strategy_s_is_not(tmp_path: Path) -> None:
    first, _ = run_ranks(trained, 2, tmp_path, tmp_path)
    for also in ALSO:
        assert not first[True, also]
        (text,) = first[False, also]
        assert "after step 5, " in text
        assert "'encoder.1.bias' by 2.9e-02, on ranks [1]" in text, "the largest difference comes first"
        assert ", on ranks [1]" in text
