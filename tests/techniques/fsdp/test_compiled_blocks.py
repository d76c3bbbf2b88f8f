"""Claim: blocks that `module.compile()` has compiled in place train under fsdp as they do on one process."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.lightning.strategy.fsdp_features import Blocks, Found, ways
from tests.lightning.strategy.strategy_cases import EVEN, Case
from tests.lightning.strategy.test_fsdp import close
from tests.ranks import run_ranks

CALLS = list[object]()


class Block(nn.Module):
    """torch compiles no Sequential in place."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.wide(x).tanh())


class Compiled(Blocks):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3)).double()
        for block in self.blocks if in_place else ():
            block.compile(backend=compiled)


def compiled(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
    CALLS.append(graph)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def trained(rank: int | None, ranks: int) -> Found:
    torch.compiler.reset()
    CALLS.clear()
    cases = {name: Case(partial(Compiled, name == "compiled"), cells=EVEN) for name in ("plain", "compiled")}
    found = ways(rank, ranks, cases)
    assert CALLS, "blocks were compiled"
    return found


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_train_as_on_one_process(tmp_path: Path) -> None:
    one = trained(None, 1)
    for rank, found in enumerate(run_ranks(trained, 2, tmp_path)):
        for name, state in found.items():
            close(state, one[name], f"{name}, rank {rank}")
