"""Blocks of a ring: which kernel takes which, how it is called, that all compute the same, and when they start."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_amp._torch import FakeTensorMode, TorchDispatchMode
from lightning_amp.errors import ShardError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.sharding.attention import blocks, fused, ring, written_out
from lightning_amp.sharding.attention.blocks import EFFICIENT, FLASH, ON_CPU, WRITTEN_OUT, BlockKernel
from lightning_amp.sharding.attention.written_out import Block
from lightning_amp.sharding.splits import MeshAxis
from tests.each import each

KERNELS: tuple[BlockKernel, ...] = (ON_CPU, FLASH, EFFICIENT, WRITTEN_OUT)
HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def aligned(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.stride(3) == 1
        assert not any(n % 8 for n in (x.shape[3], x.storage_offset(), *x.stride()[:3]))


def rows_first(*tensors: Tensor) -> None:
    assert all(x.transpose(1, 2).is_contiguous() for x in tensors)


def last_rows(q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
    """The mask of the flash kernel, which aligns the ends of rows and columns."""
    n, m = q.shape[2], k.shape[2]
    return torch.ones(n, m, dtype=torch.bool).tril(m - n) if causal else None


def flash(q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, *, scale: float) -> tuple[Any, ...]:
    aligned(q, k, v)
    out, sums = written_out.forward(Block(q, k, v, last_rows(q, k, causal), False, scale))
    return out, sums, None, None, q.shape[2], k.shape[2], torch.zeros(2), torch.zeros(()), torch.zeros(0)


def flash_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *of: Any, scale: float
) -> tuple[Tensor, ...]:
    aligned(grad, q, k, v, out)
    assert of[:5] == (None, None, q.shape[2], k.shape[2], 0.0)
    assert sums.is_contiguous()
    assert sums.shape == q.shape[:3]
    return written_out.backward(Block(q, k, v, last_rows(q, k, of[5]), False, scale), grad, out, sums)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, p: float, causal: bool, *, scale: float
) -> tuple[Any, ...]:
    aligned(q, k, v)
    check_bias(bias, q, k)
    assert sums
    out, found = written_out.forward(Block(q, k, v, bias, causal, scale))
    # the softmax of a row that sees nothing
    out, found = (
        x.masked_fill((found == -math.inf).view(*found.shape, *[1] * (x.dim() - 3)), math.nan) for x in (out, found)
    )
    seed = torch.zeros((), dtype=torch.int64)
    return out, F.pad(found, (0, -found.shape[2] % 32), value=math.inf), seed, seed


def efficient_back(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor,
    *of: Any,
    scale: float,
) -> tuple[Tensor, ...]:
    aligned(grad, q, k, v, out)
    rows_first(out)
    check_bias(bias, q, k)
    n = q.shape[2]
    assert sums.is_contiguous()
    assert sums.shape[2] == -(-n // 32) * 32
    assert (sums[..., n:] == math.inf).all()
    assert of[2:4] == (0.0, [True, True, True, False])
    return *written_out.backward(Block(q, k, v, bias, of[4], scale), grad, out, sums[..., :n]), None  # type: ignore[return-value]


def check_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.dtype == q.dtype
        assert bias.stride(3) == 1
        assert not any(n % 16 for n in (bias.storage_offset(), *bias.stride()[:3]))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of CUDA's operators, functions that demand what these read, and compute it written out."""
    monkeypatch.setattr(fused, "flash_on_cuda", flash)
    monkeypatch.setattr(fused, "flash_on_cuda_back", flash_back)
    monkeypatch.setattr(fused, "attend_on_cuda", efficient)
    monkeypatch.setattr(fused, "attend_on_cuda_back", efficient_back)


def masks(n: int, columns: int) -> Iterator[tuple[Tensor | None, bool]]:
    """Masks, and whether a block is causal."""
    generator = torch.Generator().manual_seed(1)
    added = torch.randn(1, 3, n, columns, generator=generator, dtype=DOUBLE)
    # the third row sees nothing, and nobody sees the first column
    seen = added > -0.5
    seen[:, :, 2], seen[..., 0] = False, False
    yield from ((None, False), (None, True), (added, False), (seen, False))
    yield from ((seen[:, :, :1], False), (seen[0, 0], False), (added[..., :1], False))


@each(dim=(4, 8, 9), columns=(7, 35))
def test_all_kernels_compute_the_same(stand_ins: None, monkeypatch: pytest.MonkeyPatch, dim: int, columns: int) -> None:
    generator, n = torch.Generator().manual_seed(0), 35
    q, grad = torch.randn(2, 2, n, 3, dim, generator=generator, dtype=DOUBLE).transpose(2, 3)
    # parts of a larger tensor, as of one projection
    k, v = (
        torch.randn(2, columns, 3, 2 * dim + 1, generator=generator, dtype=DOUBLE)[..., 1:].transpose(1, 2).chunk(2, 3)
    )
    for mask, causal in masks(n, columns):
        results = []
        for kernel, most in (
            (ON_CPU, 1),
            (FLASH, 1),
            (EFFICIENT, 1),
            *((WRITTEN_OUT, most) for most in (2**24, 80, 1)),
        ):
            if kernel is FLASH and (mask is not None or (causal and n != columns)):
                continue
            monkeypatch.setattr(written_out, "MOST_SCORES", most if kernel is WRITTEN_OUT else 2**24)
            monkeypatch.setattr(blocks, "kernel_of", lambda *of, kernel=kernel: kernel)
            monkeypatch.setattr(blocks, "_check", lambda *of, **how: None)
            given = [x.contiguous() if kernel is ON_CPU else x for x in (q, k, v)]
            block = Block(*given, mask, causal, 0.4)
            out, sums = blocks.block_forward(block)
            # of two such blocks
            more = sums.masked_fill(sums == -math.inf, 0) + math.log(2)
            back = blocks.block_backward(block, grad, out / 2, more)
            results.append((out, sums, *back))
        for found in results[1:]:
            torch.testing.assert_close(found, results[0], rtol=1e-11, atol=1e-12)


def test_the_check_passes_with_what_kernels_return_and_finds_what_they_do_not(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(kernel: BlockKernel, dtype: torch.dtype = FLOAT, dim: int = 6, **how: bool) -> None:
        monkeypatch.setattr(blocks, "_CHECKED", set())
        blocks._check(kernel, torch.zeros(1, 1, 1, dim, dtype=dtype), **{"masked": False, "causal": False, **how})

    for how in ({}, {"causal": True}, {"masked": True}):
        for dtype in (FLOAT, HALF, torch.float16):
            checked(EFFICIENT, dtype, **how)
    checked(FLASH, HALF, causal=True)

    def base_two(*given: Any, **how: Any) -> tuple[Any, ...]:
        out, sums, *rest = efficient(*given, **how)
        return out, sums / math.log(2), *rest

    def own_sums(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, sums: Tensor, *of: Any, scale: float
    ) -> Any:
        own = efficient(q, k, v, bias, True, 0.0, of[4], scale=scale)
        return efficient_back(
            grad, q, k, v, bias, own[0].transpose(1, 2).contiguous().transpose(1, 2), own[1], *of, scale=scale
        )

    for name, wrong in (("attend_on_cuda", base_two), ("attend_on_cuda_back", own_sums)):
        with monkeypatch.context() as patched:
            patched.setattr(fused, name, wrong)
            with pytest.raises(ShardError, match=r"the memory-efficient kernel .* 6 features, masked=False"):
                checked(EFFICIENT)


def empty(n: int, m: int, dtype: torch.dtype, device: str, dim: int = 12) -> list[Tensor]:
    return [torch.empty(2, 3, rows, dim, dtype=dtype, device=device) for rows in (n, m, m)]


class Called(TorchDispatchMode):
    """Names of the operators of attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func):
            self.names.append(func._schema.name.removeprefix("aten::_scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


@each(device=("cpu", "cuda"))
def test_without_values_the_kernel_is_that_of_the_target(device: str) -> None:
    """With tensors of the device, and with those of a CPU that stand for it: the operators' own rules for shapes."""
    rows: list[tuple[Any, ...]] = [
        (HALF, None, False, 37, FLASH),
        (torch.float16, None, True, 33, FLASH),
        (HALF, None, True, 37, EFFICIENT),
        (HALF, True, False, 37, EFFICIENT),
        (FLOAT, None, False, 37, EFFICIENT),
        (FLOAT, None, True, 33, EFFICIENT),
        (FLOAT, True, False, 37, EFFICIENT),
        (DOUBLE, None, False, 37, WRITTEN_OUT),
        (FLOAT, None, False, 0, WRITTEN_OUT),
    ]
    names = {FLASH: "flash_attention", EFFICIENT: "efficient_attention"}
    for dtype, masked, causal, m, kernel in rows:
        with FakeTensorMode(), settings_of("cuda"):
            q, k, v = empty(33, m, dtype, device)
            mask = torch.empty(33, m, dtype=torch.bool, device=device) if masked else None
            block = Block(q, k, v, mask, causal, 0.5)
            assert blocks.kernel_of(block) is kernel
            if device == "cuda" and (masked or kernel is WRITTEN_OUT):
                # torch's Python code for slices and `~` requires CUDA
                continue
            with Called() as called:
                out, sums = blocks.block_forward(block)
                back = blocks.block_backward(block, out, out, sums)
            name = names.get(kernel)
            assert called.names == ([name, f"{name}_backward"] if name else [])
            assert [x.shape for x in (out, *back)] == [x.shape for x in (q, q, k, v)]
            assert sums.shape == q.shape[:3]
            assert sums.dtype == torch.promote_types(dtype, FLOAT)
    with FakeTensorMode(), settings_of("cuda"):
        assert blocks.kernel_of(Block(*empty(3, 3, HALF, device, dim=264), None, False, 0.5)) is EFFICIENT


def test_tensors_with_values_have_the_kernel_of_their_device() -> None:
    with settings_of("cuda"):
        assert blocks.kernel_of(Block(*empty(3, 3, FLOAT, "cpu"), None, False, 0.5)) is ON_CPU


def test_a_fused_block_holds_no_scores() -> None:
    n = 4096
    with FakeTensorMode(), settings_of("cuda"):
        q, k, v = empty(n, n, HALF, "cpu", dim=64)
        with LiveBytes() as live:
            out, sums = blocks.block_forward(Block(q, k, v, None, False, 0.5))
            blocks.block_backward(Block(q, k, v, None, False, 0.5), out, out, sums)
    # the result and its copy in another memory order, its gradient's copy, three gradients, and sums in float32
    assert live.peak < 6.2 * q.nbytes


def test_what_is_no_number_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch's kernels of other devices; that for CPUs has zeros there."""
    monkeypatch.setattr(blocks, "ON_CPU", WRITTEN_OUT)
    q, k, v = torch.randn(3, 1, 1, 4, 4)
    q[..., 0, :] = torch.nan
    out, sums = blocks.block_forward(Block(q, k, v, None, False, 0.5))
    merged, _ = blocks.merged(out, sums, out, sums)
    grad = blocks.block_backward(Block(q, k, v, None, False, 0.5), out, out, sums)[0]
    for found in (out, merged, grad):
        assert found[..., 0, :].isnan().all()
    assert merged[..., 1:, :].isfinite().all()


def test_products_hold_the_scores_of_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ON_CPU", WRITTEN_OUT)
    monkeypatch.setattr(written_out, "MOST_SCORES", 800 * 20)
    q, k, v, grad = torch.randn(4, 1, 1, 800, 4)
    with LiveBytes() as live:
        out, sums = blocks.block_forward(Block(q, k, v, None, False, 0.5))
        blocks.block_backward(Block(q, k, v, None, False, 0.5), grad, out, sums)
    assert live.peak < 4 * 800 * 800 / 4


def test_keys_and_values_are_under_way_while_a_block_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = list[str]()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            happened.append(name)
            found = call(*args)
            return noted("arrive", found) if name == "send" else found

        return run

    for name, attribute in (("send", "ring"), ("block", "block_forward"), ("block", "block_backward")):
        monkeypatch.setattr(ring, attribute, noted(name, getattr(ring, attribute)))
    axis, parts = MeshAxis("a", 3, 0, None), [range(0, 4), range(4, 8), range(8, 12)]
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    out = ring.ring_attention(q, k, v, axis=axis, rows=parts, columns=parts, scale=0.5)
    assert happened == ["send", "block", "arrive"] * 2 + ["block"]
    happened.clear()
    out.sum().backward()
    # from the second block on, gradients of the block before are under way too
    assert happened == [
        *("send", "block", "send", "arrive"),
        *("send", "block", "arrive", "send", "arrive"),
        *("block", "arrive", "send", "arrive"),
    ]
