"""Claim: the bytes of a chunked module are those of its plan, never above its budget, fewer with chunks in chunks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_amp
from benchmarks.chunks.models import GPT, Fused, Language
from benchmarks.chunks.paper_models import KINDS
from lightning_amp._torch import make_fx
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.graph.captures import Captures
from lightning_amp.techniques.chunk.regions.choose_chunks import choose_chunks
from lightning_amp.techniques.chunk.run.lower import BINDINGS, binding, table_of
from tests.any_module import load
from tests.graph.calls import calls_of
from tests.techniques.chunk.small_blocks import FeedForward
from tests.techniques.chunk.test_chunk_module import bytes_of, close

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_the_least_bytes_need_no_pieces_that_save_nothing() -> None:
    """A plan of a little more bytes has the same peak in a hundredth of the operators: so has the least."""
    torch.manual_seed(0)
    module, words = GPT(64, 2, kind=Fused).eval(), torch.randint(1000, (1, 256))
    with pytest.raises(PlanError) as refused:
        lightning_amp.chunk(module, words, budget=1)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    small, more = (lightning_amp.chunk(module, words, budget=n) for n in (least, least + least // 90))
    assert small.plan.peak_bytes == more.plan.peak_bytes == least
    pieces = [sum(region.n_chunks for region in one.plan.regions[""]) for one in (small, more)]
    assert pieces[0] <= 2 * pieces[1]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gene_transformer", "unet", "evoformer", "wide_mlp", "cnn"])
def test_blocks_of_the_example_modules(name: str) -> None:
    """At half of eager's bytes where that can be, else at the least that can."""
    for call in calls_of(name):
        block = copy.deepcopy(call.block).double().eval()
        args = tuple(a.detach().double() if a.is_floating_point() else a for a in call.args)
        whole, right = bytes_of(block, *args)
        if not whole:
            continue
        try:
            small = lightning_amp.chunk(block, *args, budget=whole // 2)
        except PlanError as error:
            least = int(str(error).split("at least ")[1].split()[0])
            small = lightning_amp.chunk(block, *args, budget=least)
        found, y = bytes_of(small, *args)
        assert found <= small.plan.budget_bytes, call.fqn
        close(y, right)


class Denoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = load("unet").UNet()

    def forward(self, images: Tensor) -> Tensor:
        return F.mse_loss(self.inner(images), images)


def test_a_block_with_many_regions_meets_a_fifth() -> None:
    """80 operators have 1,600 regions of 42,000 rows together; with fewer of them no plan has a fifth."""
    torch.manual_seed(0)
    module, images = Denoise().double().eval(), torch.randn(4, 3, 64, 64).double()
    whole, right = bytes_of(module, images)
    found, y = bytes_of(lightning_amp.chunk(module, images, budget=whole // 5), images)
    assert found <= whole // 5
    close(y, right)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_the_papers_cost_chooses_exact_chunks_of_its_models(name: str) -> None:
    """And the same ones when it is asked again."""
    torch.manual_seed(0)
    module = KINDS[name].make(False, "small").double().eval()
    args = tuple(a.double() if a.is_floating_point() else a for a in KINDS[name].args("small"))
    whole, right = bytes_of(module, *args)
    small, again = (lightning_amp.chunk(module, *args, budget=whole // 2, policy="paper") for _ in range(2))
    found, y = bytes_of(small, *args)
    assert found == small.plan.peak_bytes <= whole // 2
    assert small.plan.regions == again.plan.regions != {"": ()}
    close(y, right)


@pytest.mark.full
@pytest.mark.long
def test_of_two_budgets_the_larger_is_no_slower() -> None:
    """Where the ways to run a block are more than the search keeps at one place."""
    torch.manual_seed(0)
    module, words = Language(32, 2, 200).eval(), torch.randint(200, (2, 40))
    capture = Captures().of(module, (words,), {})
    plans = [choose_chunks(table_of(capture), budget, train=True) for budget in (383_971, 483_234, 489_088)]
    seconds = [plan.seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


class Mixed(nn.Module):
    """Within a sample everything meets everything, twice along different dims."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wide(x)
        weight = torch.softmax(x @ x.transpose(1, 2), dim=-1)
        return x.amax(1), (weight @ x.cumsum(1)).tanh()


def test_a_sample_at_a_time_and_rows_within() -> None:
    """Held by the meter, exact, and with gradients too; one byte less is refused."""
    torch.manual_seed(0)
    module, x = Mixed().double().eval(), torch.randn(3, 40, 8).double()
    whole, right = bytes_of(module, x)
    with pytest.raises(PlanError) as caught:
        lightning_amp.chunk(module, x, budget=1)
    least = caught.value.least_bytes
    assert least < whole // 4
    small = lightning_amp.chunk(module, x, budget=least)
    ((region,),) = small.plan.regions.values()
    assert region.n_chunks == 3
    assert "# one chunk of region_0" in small.plan.code[""]
    found, y = bytes_of(small, x)
    assert found == small.plan.peak_bytes == least
    close(y, right)
    with pytest.raises(PlanError, match="requires at least"):
        lightning_amp.chunk(module, x, budget=least - 1)
    x.requires_grad_()
    grads = [torch.autograd.grad(sum(t.sum() for t in run(x)), [x, *module.parameters()]) for run in (small, module)]
    for own, other in zip(*grads, strict=True):
        close(own, other)


def test_mixed_samples_and_rows_that_read_their_neighbours_have_simple_chunks_only() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Softmax(0)).double().eval(), torch.randn(3, 40, 8).double()
    with pytest.raises(PlanError) as caught:
        lightning_amp.chunk(module, x, budget=1)
    small = lightning_amp.chunk(module, x, budget=caught.value.least_bytes)
    assert "one chunk of" not in small.plan.code[""]
    close(bytes_of(small, x)[1], module(x))
    # rows of one image that read their neighbours are not nested
    torch.manual_seed(0)
    module, x = (
        nn.Sequential(nn.SiLU(), nn.Conv2d(2, 2, 3, padding=1)).double().eval(),
        torch.randn(1, 2, 24, 24).double(),
    )
    with pytest.raises(PlanError) as caught:
        lightning_amp.chunk(module, x, budget=1)
    small = lightning_amp.chunk(module, x, budget=caught.value.least_bytes)
    found, y = bytes_of(small, x)
    assert found == small.plan.peak_bytes == caught.value.least_bytes
    close(y, module(x))


X, IMAGE = torch.rand(4, 4), torch.rand(1, 4, 6, 6)
ARGS: dict[str, tuple[Any, ...]] = {
    "add": (X, 2), "addcmul": (X, X, X), "avg_pool2d": (IMAGE, [2, 2]), "bmm": (IMAGE[0], IMAGE[0]),
    "cat": ([X, X], 1), "conv2d": (IMAGE, torch.rand(2, 4, 3, 3), None, [1, 1], [1, 1]),
    "elu": (X, 1.0), "expand": (X, [2, 4, 4]), "flatten": (IMAGE, 2), "group_norm": (IMAGE, 2, X[0], X[1], 1e-5),
    "layer_norm": (X, [4], X[0], X[1], 1e-5), "linear": (X, X, X[0]), "matmul": (X, X), "mean": (X, [-1], True),
    "mul": (X, 0.5), "permute": (IMAGE, [0, 2, 3, 1]), "reshape": (X, [2, -1]),
    "scaled_dot_product_attention": (IMAGE, IMAGE, IMAGE), "select": (X, 0, 1), "softmax": (X, -1), "sub": (X, X),
    "transpose": (X, 0, 1), "unflatten": (X, -1, [2, 2]), "unsqueeze": (X, 0),
    "upsample_nearest2d": (IMAGE, None, [2.0, 2.0]), "view": (X, [2, -1]),
}  # fmt: skip


@pytest.mark.parametrize("name", BINDINGS)
def test_a_binding_starts_the_same_operator(name: str) -> None:
    op, _, overload = name.partition(".")
    target = getattr(getattr(torch.ops.aten, op), overload)
    args, source = ARGS.get(op, (X,)), binding(target)
    assert source
    out = {"out": torch.empty(4, 4)} if overload == "out" else {}
    function = eval(source)
    traced = make_fx(lambda *given: function(*given, **out), pre_dispatch=True)(*args)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [target]
    assert torch.equal(function(*args, **out), target(*args, **out))


class Counting(nn.Module):
    """No graph of two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = FeedForward(16), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += x.shape[1] == 2
        return self.inner(x)


class InTwoWays(nn.Module):
    """No graph as a whole; its block is one in one of two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counting()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) + self.blocks[0](x[:, :2]).sum()


def test_a_block_that_is_no_graph_in_one_of_its_calls_is_in_chunks_in_none() -> None:
    """It was in chunks until what it changes of itself had changed, and then ran whole in silence."""
    with pytest.raises(ModelError, match=r"of blocks\.0 its forward changes the attribute 'calls'"):
        lightning_amp.chunk(InTwoWays(), torch.randn(2, 48, 16), budget=100_000)
