"""Claim: the technique `chunk` trains a block of any module to the same numbers within its bytes; what would compute
something else is refused in float64, before anything is trained with it, and the check leaves nothing behind."""

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError, ModelError, PlanError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.flow import RULES
from lightning_amp.installing.install import install_rules
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.chunk.run import check, function
from lightning_amp.techniques.chunk.run.chunk_module import chunk_block
from lightning_amp.techniques.chunk.run.function import ChunkedRegion
from lightning_amp.techniques.chunk.run.in_chunks import InChunks
from tests.graph.calls import difference
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.odd_modules.collection.blocks import DIM
from tests.odd_modules.collection.hooks import Custom
from tests.optimised import Optimised
from tests.techniques.chunk.small_blocks import Attention, FeedForward, x_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def rule(budget_bytes: int, fqn: str = "*.0") -> Rule:
    return Rule(fqn=fqn, strategy="chunk", spec=ChunkBlock(budget_bytes=budget_bytes), why="a test")


def step_bytes(run: Any, x: torch.Tensor) -> int:
    with torch.no_grad():
        seed = torch.ones_like(run(x))
    with LiveBytes() as live:
        y = run(x)
        y.backward(seed)
    return live.peak


@pytest.mark.parametrize("make_block", [Attention, FeedForward])
def test_a_block_trains_within_its_bytes(make_block: type[nn.Module]) -> None:
    torch.manual_seed(0)
    block = make_block(16).double()  # type: ignore[call-arg]
    x = x_of(2, 64, 16).detach().double().requires_grad_()
    whole = step_bytes(copy.deepcopy(block), x.detach().requires_grad_())
    run = InChunks(whole // 2, train=True)
    assert difference(block, run, (x,)) == ""
    found = step_bytes(lambda x: run(block, x), x)
    plan = run.planned(block, (x,), {}).chunks
    assert plan.regions[""]
    assert found == plan.peak_bytes <= plan.budget_bytes


def test_blocks_that_are_alike_are_planned_once() -> None:
    """Under one budget, where they know each other's plans; another budget has another plan."""
    torch.manual_seed(0)
    x, blocks = torch.randn(2, 32, 8), [Attention(8) for _ in range(3)]
    whole = step_bytes(blocks[0], x.requires_grad_())
    forms = [InChunks(n, train=True) for n in (whole // 2, whole // 2, whole)]
    for form in forms:
        form.known = forms[0].known
    plans = [form.planned(block, (x,), {}) for form, block in zip(forms, blocks, strict=True)]
    assert plans[0] is plans[1]
    assert plans[0].chunks.regions != plans[2].chunks.regions
    torch.testing.assert_close(forms[1](blocks[1], x), blocks[1](x))


def test_calls_that_are_all_unlike_are_said_and_their_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, n in (("OFTEN", 3), ("KEPT", 4)):
        monkeypatch.setattr(f"lightning_amp.techniques.chunk.run.in_chunks.{name}", n)
    block, run = FeedForward(16), InChunks(2**20, train=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [torch.equal(run(block, x), block(x)) for x in (x_of(1, n, 16).detach() for n in range(1, 8))]
    assert all(found)
    assert "planned in chunks for 3 unlike calls" in str(caught[0].message)
    assert (len(caught), len(run.known)) == (1, 4)


def test_a_rule_sets_the_forward_and_takes_it_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Attention(16), nn.Identity()))
    x = torch.randn(2, 64, 16)
    right = model(x)
    installed = install_rules(model, [rule(200_000, "0.0")])
    assert "forward" in vars(model[0][0])
    torch.testing.assert_close(model(x), right)
    torch.testing.assert_close(copy.deepcopy(model)(x), right)
    installed.undo()
    assert "forward" not in vars(model[0][0])


def test_what_does_not_fit_or_cannot_be_captured_is_refused_or_told() -> None:
    with pytest.raises(InstallError, match="got budget_bytes=0; allowed is a number of bytes larger than zero"):
        chunk_block(FeedForward(), ChunkBlock(budget_bytes=0), None)
    with pytest.raises(PlanError, match="at least"):
        InChunks(100)(FeedForward(), x_of(8, 6))
    with pytest.raises(ModelError, match="in training, which cannot be captured: .*'Scale'"):
        InChunks(10**6, train=True)(Custom(), x_of(3, DIM))
    # a call that needs more than its plan was made for is told
    block, x = FeedForward(), x_of(8, 6)
    told = pytest.warns(UserWarning, match=r"has 100 B by the plan.*called with \[8, 6\] it needs")
    with told, pytest.warns(UserWarning, match="was not compared with its own forward: in float64 it takes"):
        found = InChunks(100, train=True)(block, x)
    torch.testing.assert_close(found, block(x))


class Backwards(Attention):
    """Tokens in reverse order, of which no rule of ours knows."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.transpose(-1, -2), dim=-1).flip(1) @ v)


class Narrow(Attention):
    """Casts, a mask of its arguments, noise, a constant, and numbers that are made of whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2 = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = F.dropout(x, 0.3) + torch.arange(8) / 3 + torch.tensor(0.1)
        weight = torch.softmax((x @ x.transpose(1, 2)).masked_fill(~keep, -torch.inf), -1, dtype=torch.float32)
        x = super().forward((weight.to(x.dtype) @ x).float())
        return self.norm2(x.transpose(1, 2))


@pytest.fixture
def wrong_rule() -> Iterator[None]:
    """Somebody's: the dim that is reversed would be one that can be cut."""
    lightning_amp.register_flow("flip")(lambda call: [[(0, d)] for d in range(len(call.result))])
    yield
    del RULES["flip"]


def in_chunks(block: nn.Module, *args: Any, share: float = 0.6) -> InChunks:
    twin, x = copy.deepcopy(block), args[0].detach().requires_grad_()
    whole = step_bytes(lambda x: twin(x, *args[1:]), x)
    return InChunks(int(share * whole), train=True)


@pytest.mark.usefixtures("wrong_rule")
def test_a_wrong_rule_of_somebody_is_refused() -> None:
    torch.manual_seed(0)
    block, x = Backwards(), x_of(2, 64, 8)
    run = in_chunks(block, x)
    with pytest.raises(InstallError, match=r"'Backwards' in chunks does not .*\[2, 4, 8\].*aten.flip.*register_flow"):
        run(block, x)
    with torch.no_grad(), pytest.raises(InstallError, match="returns result 0 that differs by"):
        lightning_amp.chunk(block, x, budget=run._budget_bytes // 4)(x)


def test_what_is_right_passes_once_and_leaves_nothing() -> None:
    torch.manual_seed(0)
    block, x, keep = Narrow(), x_of(4, 64, 8), torch.ones(64, 64, dtype=torch.bool).tril()
    run = in_chunks(block, x, keep)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    twin, drawn = copy.deepcopy(block), torch.get_rng_state()
    found = run(block, x, keep)
    after = torch.get_rng_state()
    torch.set_rng_state(drawn)
    torch.testing.assert_close(found, twin(x, keep))
    assert torch.equal(torch.get_rng_state(), after)
    assert block.norm2.num_batches_tracked == 1
    assert all(torch.equal(before[n], p) and p.grad is None for n, p in block.named_parameters())
    assert torch.get_default_dtype() == torch.float32


class Deprecated(Attention):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("a library's", UserWarning, stacklevel=1)
        return super().forward(x)


def test_a_warning_where_warnings_are_errors_does_not_end_a_check() -> None:
    torch.manual_seed(0)
    block, x = Deprecated(), x_of(2, 64, 8)
    with warnings.catch_warnings(action="ignore"):
        run, expected = in_chunks(block, x), block(x)
        planned = run.planned(block, (x,), {})
    torch.testing.assert_close(planned.run(block, x), expected)


def test_a_block_warns_once_as_by_itself() -> None:
    """Neither the capture nor the check does."""
    torch.manual_seed(0)
    block, x = Deprecated(), x_of(2, 64, 8)
    with warnings.catch_warnings(action="ignore"):
        run = in_chunks(block, x)
    with warnings.catch_warnings(record=True, action="always") as caught:
        run(block, x)
    assert [str(one.message) for one in caught] == ["a library's"]


def test_a_check_takes_few_bytes() -> None:
    torch.manual_seed(0)
    block, x = Attention(), x_of(2, 512, 8)
    run = in_chunks(block, x)
    planned = run.planned(block, (x,), {})
    with LiveBytes() as live:
        planned.run(block, x)
    # the second time it is not checked
    with LiveBytes() as again:
        planned.run(block, x)
    assert live.peak == again.peak <= run._budget_bytes


class Rows(nn.Module):
    """Rows that are looked up: fewer positions would not have them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.narrow(self.wide(x[:, rows]).exp().tanh())


def test_a_call_that_cannot_be_smaller_is_checked_as_it_is_or_told() -> None:
    torch.manual_seed(0)
    block, x, rows = Rows(), x_of(2, 64, 6), torch.arange(63, -1, -1)
    run = in_chunks(block, x, rows, share=0.9)
    with pytest.warns(UserWarning, match=r"'Rows' computes in chunks, .* not compared .*fewer positions"):
        torch.testing.assert_close(run(block, x, rows), block(x, rows))
    kept: list[Any] = []
    mine = check._outcome

    def outcome(block: nn.Module, call: Any, made: Any, **options: Any) -> Any:
        kept.append(call[0][0].shape)
        return mine(block, call, made, **options)

    run.planned(block, (x, rows), {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_outcome", outcome)
        checked = check.Checked(lowered_of(run), run._budget_bytes, run._budget_bytes // 2)
        checked(block, x, rows)
    assert kept[-2:] == [x.shape, x.shape]


class Head(nn.Module):
    """Most of it is one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(8), nn.Linear(8, 500, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x)).logsumexp(-1)


def test_gradients_of_a_large_parameter_are_compared_where_there_is_room() -> None:
    torch.manual_seed(0)
    block, x = Head(), x_of(4, 64, 8)
    run = in_chunks(block, x, share=0.5)
    run(block, x)
    lowered, kept, mine = lowered_of(run), list[set[str]](), check._outcome

    def outcome(*args: Any, **options: Any) -> Any:
        found = mine(*args, **options)
        kept.append({name for name, value in found.items() if value is not None})
        return found

    large = "gradient of 'words.weight'"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_outcome", outcome)
        for budget in (10**6, 50_000):
            check.Checked(lowered, budget, 0)(block, x)
    assert [large in names for names in kept] == [True, True, False, False]
    assert kept[0] - kept[2] == {large}


def lowered_of(run: InChunks) -> Any:
    (planned,) = run.known.values()
    return planned.run._lowered  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", ["positions", "gradient", "halo"])
def test_code_that_is_wrong_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    block, x = Attention(), x_of(2, 64, 8)
    run: Any = in_chunks(block, x)
    if wrong == "positions":
        piece = ChunkedRegion.piece
        before = lambda self, t, dim, start, n: piece(self, t, dim, max(start - 1, 0), n)  # noqa: E731
        monkeypatch.setattr(ChunkedRegion, "piece", before)
    elif wrong == "gradient":
        monkeypatch.setattr(function._Gradient, "value", lambda self: self._sum * (1 - 1e-9))
    else:
        wide, narrow = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1)
        block, x = nn.Sequential(wide, nn.SiLU(), narrow), x_of(1, 3, 64, 64).detach()
        run = partial(lightning_amp.chunk, budget=120_000)
        monkeypatch.setattr(ChunkedRegion, "reached", lambda self, start, size: (start, size))
    with (
        torch.set_grad_enabled(wrong != "halo"),
        pytest.raises(InstallError, match="does not compute what its own forward does"),
    ):
        run(block, x)


class Trained(Optimised, by=torch.optim.Adam):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.steps = nn.ModuleList(Backwards() for _ in range(2)), 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1


@pytest.mark.usefixtures("wrong_rule")
def test_a_run_with_a_wrong_rule_ends_before_its_first_step() -> None:
    module, rows = Trained(), DataLoader(torch.randn(2, 128, 8), batch_size=1)  # type: ignore[arg-type]
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(InstallError, match=r"^blocks\.0: a block 'Backwards' in chunks.*aten.flip"):
        trainer_of(AMPStrategy(strategies="chunk")).fit(module, rows)
    assert module.steps == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_mixed_precision_is_checked_in_64_bits() -> None:
    torch.manual_seed(0)
    block, x = Attention(), x_of(2, 64, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = in_chunks(block, x)
        torch.testing.assert_close(run(block, x), block(x))


class Conditioned(nn.Module):
    """Pixels look at the words of a text; an image is as large as it has channels, and words are as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.kv = nn.Conv2d(32, 32, 3, padding=1), nn.Linear(32, 64)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        k, v = self.kv(text).chunk(2, -1)
        q = self.conv(F.silu(x)).flatten(2).transpose(1, 2)
        return x + (torch.softmax(q @ k.transpose(1, 2), -1) @ v).transpose(1, 2).reshape(x.shape)


def test_an_image_as_large_as_it_has_channels_is_checked_in_few_bytes() -> None:
    torch.manual_seed(0)
    block, x, text = Conditioned(), x_of(1, 32, 32, 32), x_of(1, 24, 32)
    with torch.no_grad():
        with LiveBytes() as whole:
            right = block(x, text)
        run = InChunks(int(0.6 * whole.peak))
        assert run.planned(block, (x, text), {}).chunks.regions[""]
        with LiveBytes() as live:
            found = run(block, x, text)
    torch.testing.assert_close(found, right)
    assert live.peak <= run._budget_bytes
