"""Steps of which some tensors run again, some wait on the host and some stay are bit by bit those of autograd, and have
the counted bytes."""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_amp import AMPStrategy
from lightning_amp.costs.device_rates import rates_for
from lightning_amp.errors import ModelError
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.base.plan_request import StepRequest
from lightning_amp.planning.modules.candidates import draft
from lightning_amp.techniques.offload.moves import Moves
from lightning_amp.techniques.offload.row import Offload
from lightning_amp.techniques.offload.unseen_writes import UnseenWrites
from lightning_amp.techniques.replay.choose_cuts import AT_ONCE, KEPT, ONE_BY_ONE
from lightning_amp.techniques.replay.recorded import Outside
from lightning_amp.techniques.replay.row import ReplayOperators
from lightning_amp.techniques.replay.tape import Tape
from tests.techniques.offload.test_fit import Odd, odd, odd_data, run, spec_of
from tests.techniques.offload.test_moves import LARGE, draws, layers, moves
from tests.techniques.replay.cases import CASES, equal, rows, trained, weight
from tests.techniques.replay.models import MODELS, difference, fit, plain
from tests.techniques.replay.test_fit import ALL, by_hand

Ends = Sequence[tuple[int, int]]


def both(used: Moves, held: Any, ends: Ends, **options: Any) -> ExitStack:
    """What a step runs in with both techniques installed."""
    stack = ExitStack()
    stack.enter_context(used.step(held))
    stack.enter_context(UnseenWrites(used))
    tape = stack.enter_context(Tape(ends, **options))
    stack.enter_context(tape.hooks())
    return stack


def inside(used: Moves, ends: Ends, keeps: Sequence[int], held: Any, first: bool) -> ExitStack:
    return both(used, held, ends, keeps=keeps, compares=first)


def operators_of(make: Callable[[], Any]) -> int:
    step, *_ = make()
    with Tape([]) as tape:
        step()
    return tape.at


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_every_step_is_the_same_whatever_runs_again_and_whatever_leaves() -> None:
    choose, wrong, moved = random.Random(3), list[str](), 0
    for name, make in {**CASES, "random_numbers": draws}.items():
        right = trained(make)
        n = operators_of(make)
        tries: list[Ends] = [[(ALL, AT_ONCE)], [(ALL, ONE_BY_ONE)]]
        for k in (1, 3):
            cuts = sorted(choose.sample(range(1, n + 1), min(k, n)))
            tries.append([*((cut, choose.choice((KEPT, AT_ONCE, ONE_BY_ONE))) for cut in cuts), (ALL, AT_ONCE)])
        for ends in tries:
            for options in ({"window": 0}, {"window": 600}, {"window": LARGE}, {"leaves": (0, 2, 3)}):
                keeps = choose.sample(range(n), n // 6)
                used = moves(**options)
                found = trained(make, partial(inside, used, ends, keeps))
                moved += len(used.sizes)
                if not equal(right, found):
                    wrong.append(f"{name} {ends} {keeps} {options}")
    assert not wrong
    assert moved > 500


@pytest.mark.parametrize("window", [0, 100_000, LARGE])
@pytest.mark.parametrize("kind", [AT_ONCE, ONE_BY_ONE])
def test_bytes_are_counted_without_values(window: int, kind: int) -> None:
    ends, found = ((10, kind), (25, KEPT), (40, kind)), list[Any]()
    for fake in (False, True):
        with QuickFakes(valid=True) if fake else nullcontext():
            step, parameters = layers()
            x, used, peaks = torch.ones(64, 64, dtype=torch.float64), moves(window=window), list[int]()
            for _ in range(2):
                with LiveBytes() as live:
                    live.watch([x, *parameters])
                    with both(used, [x, *parameters], ends, views=False):
                        loss = step(x)
                    loss.backward()
                del loss
                peaks.append(live.peak)
            found.append((peaks, used.pool.n_bytes, used.sizes, used.came_bytes))
    assert found[0] == found[1]
    # with a large window everything is still there when it is asked for
    assert (found[0][3] > 0) == (window < LARGE)


def test_what_a_replayed_stretch_reads_waits_on_the_host() -> None:
    x, w, used = rows(512, 64), weight(64, 64), moves()

    def step() -> Tensor:
        h = x @ w
        for _ in range(6):
            h = (h.sin() @ w).cos()
        return h.sum()

    right = torch.autograd.grad(step(), w)[0]
    with LiveBytes() as live, both(used, [x, w], [(6, AT_ONCE), (12, AT_ONCE), (ALL, AT_ONCE)]):
        loss = step()
        held = live.current
    # but for the last result, everything that crosses a cut has left
    assert held <= 2 * 512 * 64 * 8
    assert used.sizes == [512 * 64 * 8] * 2
    assert torch.equal(torch.autograd.grad(loss, w)[0], right)
    assert used.came_bytes == sum(used.sizes)
    # nothing holds the buffers any more
    with used.step([x, w]):
        (x @ w).sin().sum().backward()
    assert used.pool.n_bytes == 2 * 512 * 64 * 8


def test_a_graph_that_is_kept_and_second_derivatives_are_the_same() -> None:
    x = rows(64, 64).requires_grad_()

    def step() -> Tensor:
        h = (x * 2).sin()
        return (h.exp() * h).square().sum()

    right = torch.autograd.grad(step(), x, create_graph=True)[0]
    second = torch.autograd.grad(right.sum(), x)[0]
    for kind in (AT_ONCE, ONE_BY_ONE):
        for cut in (1, 2, 3):
            used = moves()
            with both(used, [x], [(cut, kind), (cut + 1, KEPT), (ALL, kind)]):
                loss = step()
            first = torch.autograd.grad(loss, x, retain_graph=True, create_graph=True)[0]
            assert torch.equal(first, right)
            assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], right)
            assert torch.equal(torch.autograd.grad(first.sum(), x)[0], second)
            assert used.sizes


def test_writes_are_refused_or_replayed_as_by_each_alone() -> None:
    w = weight(8, 8)

    def in_place(w: Tensor) -> Tensor:
        h = (rows(4, 8) @ w).exp()
        y = h.sin()
        h.mul_(2)
        return (y @ w).sum()

    def by_data(w: Tensor) -> Tensor:
        h = (rows(4, 8) @ w).exp()
        y = h.sin()
        h.data.mul_(2)
        return (y * h).sum()

    for ends in ([(1, KEPT), (2, AT_ONCE), (ALL, KEPT)], [(3, AT_ONCE), (ALL, KEPT)], [(ALL, AT_ONCE)], []):
        with both(moves(), [w], ends):
            loss = in_place(w)
        with pytest.raises(ModelError, match="changed in place"):
            loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match=r"mul_.* autograd does not see"), both(moves(), [w], []):
        by_data(w)


def test_an_old_value_that_a_stretch_reads_comes_back_although_it_was_written_later() -> None:
    """The stretch runs again from the values before the write, which may have left or still be on the device."""
    w = weight(64, 64)

    def step() -> Tensor:
        mean = torch.zeros(64, dtype=torch.float64)
        y = torch.zeros(32, 64, dtype=torch.float64)
        for _ in range(3):
            h = rows(32, 64) @ w
            y = y + (h - mean).tanh() * h.cos()
            with torch.no_grad():
                mean.mul_(0.9).add_(h.mean(0))
        return (y @ w).sum()

    right = torch.autograd.grad(step(), w)[0]
    for k in range(2, 30, 3):
        for kind in (AT_ONCE, ONE_BY_ONE):
            used = moves()
            with both(used, [w], [(k, kind), (k + 4, kind), (ALL, kind)]):
                loss = step()
            assert torch.equal(torch.autograd.grad(loss, w)[0], right), (k, kind)


def test_what_is_away_is_found_only_on_its_own_storage() -> None:
    """The address of a storage that was freed may be that of another one, which is written to."""
    x, other = rows(8, 8), rows(8, 8) + 1
    before = x[2:, ::2].clone()
    one = Outside(x[2:, ::2].detach(), 0)
    assert one.on(other.untyped_storage()) is one.tensor
    one.leave(lambda tensor: tensor.clone(), lambda packed: packed)
    assert one.tensor.untyped_storage().nbytes() == 0
    assert one.on(other.untyped_storage()) is None
    there = one.on(x.untyped_storage())
    assert there is not None
    assert torch.equal(there, x[2:, ::2])
    assert there.stride() == (8, 2)
    x.add_(1)
    assert one.was_changed
    one.come_back()
    assert not one.was_changed
    assert torch.equal(one.tensor, before)


@pytest.mark.parametrize(("names", "share"), [("offload", None), ("replay,offload", None), ("replay,offload", 0.5)])
def test_an_odd_module_trains_as_without_at_the_predicted_bytes(names: str, share: float | None) -> None:
    data = odd_data(256, 256, 256)
    right, whole, _ = run(odd(), data, "auto")
    after = torch.rand(3)
    budget = None if share is None else int(share * whole.live.peak)
    found, metered, plan = run(odd(), data, AMPStrategy(strategies=names, device_memory=budget))
    # dropout draws the same
    assert torch.equal(torch.rand(3), after)
    assert difference(right, found) == 0.0
    # a budget may need only one of them
    assert budget is not None or plan.strategies == ("S1", *names.split(","))
    spec = spec_of(plan)
    assert metered.live.peak == plan.predicted_peak_bytes < 0.7 * whole.live.peak
    assert budget is None or metered.live.peak <= budget
    assert metered.moves is not None
    assert metered.moves.pool.n_bytes == spec.host_bytes > 0
    assert sum(metered.moves.sizes) == spec.moved_bytes
    assert len(metered.moves.sizes) == len(spec.numbers)


def test_a_given_plan_of_both_trains_at_the_predicted_bytes(tmp_path: Path) -> None:
    before, peak = plain("points")
    made = fit("points", AMPStrategy(strategies="offload"), steps=1)[2]
    rule, predicted = next(one for one in made.rules if one.strategy == "offload"), list[int]()
    for ends, leaves, window in (("31-,68,105+,142", None, 0), ("31-,68,105+,142", "0-2,5", 2_000_000)):
        again = replace(rule, strategy="replay", spec=ReplayOperators(ends=ends))
        # what is saved was counted without the replay
        leaving = replace(rule, spec=replace(rule.spec, leaves=leaves, window=window, saves=""))
        both_rules = replace(made, strategies=("S1", "replay", "offload"), rules=(*made.rules[:-1], again, leaving))
        (tmp_path / "plan.json").write_text(both_rules.to_json())
        after, metered, given = fit("points", AMPStrategy(plan=tmp_path / "plan.json"), steps=2)
        assert difference(before, after) == 0.0
        assert metered.live.peak == given.predicted_peak_bytes < 0.8 * peak
        predicted.append(given.predicted_peak_bytes)
    assert predicted[0] < predicted[1]


def test_on_a_link_both_are_no_slower_than_one() -> None:
    """Predicted, for a small step on a device as much slower than a GPU."""
    torch.manual_seed(0)
    rates = replace(
        rates_for("H100"), memory=None, host_bandwidth=6e8, overhead_seconds=1e-7, matmul_flops=6e11, memory_bytes=3e10
    )
    make, batches = MODELS["points"]
    step = StepOfModule(make(), lambda: batches(1), run_settings=RunSettings())
    seen = step.profiled(rates, StepRequest(requested={"offload": Offload()}))
    found = dict[str, Any]()
    for names in ("replay", "offload", "replay,offload"):
        found[names] = draft(seen, names.split(","), ranks=1, budget=int(0.6 * seen.peak_bytes(1)))
        assert found[names].peak_bytes <= 0.6 * seen.peak_bytes(1)
    assert found["replay,offload"].seconds <= 1.001 * min(found["replay"].seconds, found["offload"].seconds)


@pytest.mark.long
def test_several_backward_passes_of_a_step_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def manual() -> Any:
        torch.manual_seed(0)
        return by_hand(Odd)().double()

    monkeypatch.setitem(MODELS, "odd", (manual, lambda n: torch.randn(64 * n, 32)))
    data = odd_data(128, 128)
    before, _, _ = run(manual(), data, "auto")
    after, metered, plan = run(manual(), data, AMPStrategy(strategies="replay,offload"))
    assert difference(before, after) == 0.0
    assert metered.live.peak <= plan.predicted_peak_bytes


def test_a_part_of_a_step_that_neither_sees_is_the_same() -> None:
    """Random operators on odd layouts: strided, expanded and transposed views, dropout, chunks, copies into slices."""
    w = weight(24, 24)
    operators: list[Callable[[Tensor], Tensor]] = [
        lambda h: h @ w,
        lambda h: h.sin(),
        lambda h: functional.dropout(h, 0.3),
        lambda h: functional.relu_(h * 1.5),
        lambda h: h.t().contiguous().t() * 2,
        lambda h: torch.cat([part.tanh() for part in h.chunk(3, -1)], -1),
        lambda h: h + h[:1].expand_as(h),
        lambda h: h[::2].repeat_interleave(2, 0).exp().clamp(max=2.0),
        lambda h: torch.zeros_like(h).index_copy(0, torch.arange(len(h)).flip(0), h),
        lambda h: h.mul_(0.5).clone() * h.detach(),
        lambda h: functional.layer_norm(h, (24,)),
        lambda h: h.as_strided((len(h), 24), (24, 1)).cumsum(0),
    ]
    choose = random.Random(7)
    for _ in range(12):
        chain = [choose.choice(operators) for _ in range(9)]

        def step(chain: Any = tuple(chain)) -> Tensor:
            torch.manual_seed(4)
            h = rows(16, 24) @ w
            for one in chain:
                h = one(h * 1.0)
            return h.square().mean()

        right = torch.autograd.grad(step(), w)[0]
        n = operators_of(lambda step=step: (step, [w]))
        cuts = sorted(choose.sample(range(1, n), 3))
        ends = [*((cut, choose.choice((KEPT, AT_ONCE, ONE_BY_ONE))) for cut in cuts), (ALL, AT_ONCE)]
        used = moves(window=choose.choice((0, 4000, LARGE)))
        with both(used, [w], ends, compares=True):
            loss = step()
        assert torch.equal(torch.autograd.grad(loss, w)[0], right), ends
