"""The predicted peak of every rank of a pipeline is the counted one to the byte, whatever the step keeps for itself."""

import warnings
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.techniques.pipeline.run.messages import Messages
from lightning_amp.techniques.ranks.placeholders import Placeholders
from tests.each import BEFORE_A_RELEASE
from tests.lightning.pipeline.pipeline_cases import trainer_of
from tests.ranks import run_ranks
from tests.techniques.offload.test_on_grids import Noted

WORDS, WIDTH, LENGTH, SAMPLES = 60, 8, 12, 8


class Residual(nn.Module):
    """Rows come before samples inside, so that it returns a tensor that is not contiguous."""

    def __init__(self, *, turns: bool) -> None:
        super().__init__()
        self.turns, self.up, self.down = turns, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1).contiguous() if self.turns else x
        x = x + self.down(F.gelu(self.up(x)))
        return x.transpose(0, 1) if self.turns else x


class Model(pl.LightningModule):
    micro_batches = 4

    def __init__(self, *, turns: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Residual(turns=turns) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Words(Model):
    """Integers of which each call has copies; one weight on two ranks; logits in a variable and in what is returned."""

    def __init__(self) -> None:
        super().__init__(turns=False)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.first, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        # a placeholder with a graph on the second rank, which has the weight of the words
        x = self.first(self.words(batch["ids"]) + self.places.weight)
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), "logits": logits}


class Patches(Model):
    """A batch larger than all else, of which the second rank sees placeholders; a loss in the memory of all losses."""

    def __init__(self) -> None:
        super().__init__(turns=True)
        self.patches, self.head = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(WIDTH, 4)
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.body(self.patches(batch["images"]).flatten(2).mT)
        return F.mse_loss(self.head(x.mean(1)), F.one_hot(batch["labels"], 4).double())


class Masked(Words):
    """Writes into its labels, so that copies stay until the step ends."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        batch["labels"][:, 0] = 1
        return super().training_step(batch, batch_idx)


class Scaled(Residual):
    """Its backward pass begins, and its forward pass ends, with products of which autograd saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * 0.5
        return torch.stack([x, x]).sum(0)


class Part(Residual):
    """Returns a part of a larger tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x)] * 3, -1)[..., :WIDTH]


class Varied(Words):
    """One sample at a time, words that are their own labels, a token before all, dropout before the blocks.

    The gradient of the token is a view of that of all words, in one sample, and the loss runs again to see that it does
    not depend on what was drawn.
    """

    micro_batches = SAMPLES
    block: type[Residual] = Scaled

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(turns=False) for _ in range(4)).double()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH, dtype=torch.float64))
        self.own: nn.Module = nn.Linear(WIDTH, WORDS, dtype=torch.float64)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        x = torch.cat([self.token.expand(len(batch["ids"]), -1, -1), F.dropout(self.words(batch["ids"]), 0.1)], 1)
        logits = self.own(self.body(x))[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=True)


class Parts(Varied):
    block = Part


class Late(Varied):
    """Most of its bytes follow the blocks; the last rank has the words too, and draws for them."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, WIDTH)]
        self.own = nn.Sequential(*layers, self.head).double()


def batch_of(kind: type[Model]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    if kind is Patches:
        images = torch.randn(SAMPLES, 3, 48, 48, generator=draw, dtype=torch.float64)
        return {"images": images, "labels": torch.randint(4, (SAMPLES,), generator=draw)}
    if issubclass(kind, Varied):
        return dict.fromkeys(("ids", "labels"), torch.randint(WORDS, (SAMPLES, LENGTH), generator=draw))
    return {key: torch.randint(WORDS, (SAMPLES, LENGTH), generator=draw) for key in ("ids", "labels")}


Case = tuple[type[Model], str, str]
ORDERS, BOTH = ("gpipe", "1f1b", "interleaved"), ("pipeline", "pipeline,offload")
EVERY: list[Case] = [
    *product((Words, Patches), ORDERS, BOTH),
    *product((Varied,), ORDERS, ("pipeline", "pipeline,recompute")),
    *product((Parts, Late), ORDERS[:2], ("pipeline",)),
    (Masked, "1f1b", "pipeline"),
]
FEW: list[Case] = [
    *((Words, "1f1b", names) for names in BOTH),
    *((Patches, order, "pipeline") for order in ("gpipe", "1f1b")),
    (Words, "gpipe", "pipeline,offload"),
    *((Varied, order, "pipeline,recompute") for order in ("gpipe", "1f1b")),
    (Parts, "1f1b", "pipeline"),
    (Late, "gpipe", "pipeline"),
    (Masked, "1f1b", "pipeline"),
]
MORE: dict[Case, int] = {
    # which rank writes into its copies is not known
    (Masked, "1f1b", "pipeline"): 2 * SAMPLES * LENGTH * 8,
    # a gradient that is not contiguous may be copied once more, if the backward pass begins with a product
    (Patches, "gpipe", "pipeline,offload"): SAMPLES // 4 * 36 * WIDTH * 8,
}


def peaks(rank: int, ranks: int, cases: list[Case]) -> list[dict[str, Any]]:
    found = []
    for kind, order, names in cases:
        warnings.simplefilter("ignore")
        seed_everything(3, verbose=False)
        meter = Noted()
        settings = {"strategies": names, "schedule": order, "micro_batches": kind.micro_batches}
        trainer = trainer_of((rank, ranks), settings, {"callbacks": [meter]})
        batches: Any = [batch_of(kind) for _ in range(3)]
        trainer.fit(kind(), DataLoader(batches, batch_size=None))
        plan, moves = trainer.strategy.plan, meter.moves
        found.append({
            "peaks": (plan.stages[rank].peak_bytes, meter.live.peak),
            "moved": None if moves is None else sum(moves.sizes),
            "said": max((getattr(rule.spec, "moved_bytes", 0) for rule in plan.rules), default=0),
        })  # fmt: skip
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("cases", [
    pytest.param(FEW, id="few"),
    pytest.param(EVERY, id="every", marks=BEFORE_A_RELEASE),
])  # fmt: skip
def test_predicted_peaks_are_those_of_the_ranks(tmp_path: Path, cases: list[Case]) -> None:
    every = run_ranks(peaks, 2, tmp_path, cases, timeout=300)
    for n, case in enumerate(cases):
        ranks = [found[n] for found in every]
        for rank, found in enumerate(ranks):
            predicted, counted = found["peaks"]
            assert counted <= predicted <= counted + MORE.get(case, 0), (case, rank)
        if "offload" in case[2]:
            assert max(found["moved"] for found in ranks) == ranks[0]["said"], case


def test_placeholders_take_no_memory() -> None:
    live = LiveBytes()
    with live, Placeholders(torch.device("cpu")) as mode:
        assert mode.of(torch.ones(4, 4)).exp().shape == (4, 4)
    # of the tensor with values
    assert live.peak == 4 * 4 * 4


def gradients_on_their_way(rank: int, ranks: int) -> list[int]:
    found, send_back = [], Messages.send_back

    def counted(self: Any, stage: int, *given: Any) -> None:
        send_back(self, stage, *given)
        found[-1] = max(found[-1], sum(key >= self._stages for key, _ in self._sent))

    for order in ORDERS:
        found.append(0)
        with patch.object(Messages, "send_back", counted):
            peaks(rank, ranks, [(Varied, order, "pipeline")])
    return found


@pytest.mark.ranks
def test_gradients_for_the_stage_before_are_kept_until_the_next_ones_are_sent(tmp_path: Path) -> None:
    # an interleaved rank has one for each of its stages
    assert run_ranks(gradients_on_their_way, 2, tmp_path) == [[0, 0, 1], [1, 1, 2]]
