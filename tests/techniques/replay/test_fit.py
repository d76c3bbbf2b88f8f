"""Steps that are replayed train as plain ones do, bit by bit, wherever segments end, under a budget, at the predicted
peak."""

import copy
import inspect
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_amp import AMPStrategy
from lightning_amp.errors import AmpError, ModelError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.put_methods import method_of
from lightning_amp.techniques.replay.row import AT_ONCE, KEPT, ONE_BY_ONE, ReplayOperators, written
from lightning_amp.techniques.replay.segment import Segment
from lightning_amp.techniques.replay.tape import Tape
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.replay.cases import CASES, equal, rows, trained, weight
from tests.techniques.replay.models import MODELS, Points, difference, fit, plain


@pytest.mark.long
def test_any_module_trains_within_a_budget_at_the_predicted_peak() -> None:
    for name, share in (("U-Net", 0.7), ("WaveNet", 0.5), ("points", 0.5)):
        before, peak = plain(name)
        after, metered, plan = fit(name, AMPStrategy(device_memory=int(share * peak)), steps=2)
        assert [rule.strategy for rule in plan.rules] == ["replay"], name
        assert metered.live.peak <= int(share * peak), name
        assert metered.live.peak == pytest.approx(plan.predicted_peak_bytes, rel=0.01), name
        # the same operators on the same values
        assert difference(before, after) == 0.0, name


@pytest.mark.full
@pytest.mark.long
def test_a_tight_budget_runs_stretches_again_for_one_tensor_after_the_other() -> None:
    before, peak = plain("ResNet")
    after, metered, plan = fit("ResNet", AMPStrategy(device_memory=int(0.52 * peak)), steps=2)
    (spec,) = (rule.spec for rule in plan.rules)
    assert ONE_BY_ONE in {kind for _, kind in spec.segments}
    assert metered.live.peak == plan.predicted_peak_bytes <= int(0.52 * peak)
    assert difference(before, after) == 0.0
    # without a budget nothing asks for the time that this takes
    free = fit("ResNet", AMPStrategy(strategies="replay"), steps=1)[2]
    assert ONE_BY_ONE not in {
        kind for rule in free.rules if rule.strategy == "replay" for _, kind in rule.spec.segments
    }


@pytest.mark.long
def test_convolutions_whose_results_are_kept_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before, peak = plain("ResNet")
    run, again = Segment._run, dict[int, str]()
    monkeypatch.setattr(
        Segment, "_run", lambda *given: again.update({given[1].at: given[1].func.__name__}) or run(*given)
    )
    after, metered, plan = fit("ResNet", AMPStrategy(device_memory=int(0.65 * peak)), steps=2)
    (spec,) = (rule.spec for rule in plan.rules)
    assert metered.live.peak == plan.predicted_peak_bytes <= int(0.65 * peak)
    assert difference(before, after) == 0.0
    assert spec.places_kept
    assert not spec.places_kept & again.keys()
    ran = list(again.values())
    assert ran.count("convolution.default") < ran.count("native_batch_norm.default")
    # as it is written in a plan
    assert ReplayOperators(ends="12", keeps="3,10").places_kept == {3, 10}


@pytest.mark.full
def test_a_plan_is_kept_as_json_and_carried_out_again(tmp_path: Path) -> None:
    _, _, plan = fit("points", AMPStrategy(strategies="replay"), steps=1)
    (tmp_path / "plan.json").write_text(plan.to_json())
    again, _, given = fit("points", AMPStrategy(plan=tmp_path / "plan.json"), steps=2)
    assert [rule.spec for rule in given.rules] == [rule.spec for rule in plan.rules]
    assert given.predicted_peak_bytes == plan.predicted_peak_bytes
    assert difference(plain("points")[0], again) == 0.0
    assert isinstance(copy.deepcopy(given), Plan)
    assert written(ReplayOperators(ends="12,30-,47+").segments) == "12,30-,47+"


def on_ranks(rank: int, ranks: int, model: str, technique: str, double: bool = False) -> list[Any]:
    """The state, the peak and the rules without a technique and with it; each rank has half of the batches."""
    options: dict[str, Any] = {"devices": ranks, "plugins": [RunningRanks(rank, ranks)], "double": double}
    found = []
    for names in ("S1", f"S1,{technique}"):
        module, meter, plan = fit(model, AMPStrategy(strategies=names), steps=4, **options)
        found.append((module.state_dict(), meter.live.peak, [rule.strategy for rule in plan.rules]))
    return found


@pytest.mark.ranks
def test_ranks_average_gradients_of_replayed_steps(tmp_path: Path) -> None:
    for (right, whole, _), (state, peak, rules) in run_ranks(on_ranks, 2, tmp_path, "U-Net", "replay"):
        assert "replay" in rules
        assert peak < 0.75 * whole
        torch.testing.assert_close(state, right, rtol=0, atol=0)


def by_hand(kind: Any) -> Any:
    """With two backward passes and two updates in a step."""

    class Manual(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer: Any = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad(set_to_none=False)
                loss: Tensor = self.loss(batch)
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
            return loss

    return Manual


@pytest.mark.full
@pytest.mark.long
def test_manual_optimisation_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "points", (by_hand(Points), MODELS["points"][1]))
    before, meter, _ = fit("points", "auto", steps=2)
    after, metered, plan = fit("points", AMPStrategy(strategies="replay"), steps=2)
    assert metered.live.peak < 0.5 * meter.live.peak
    assert metered.live.peak <= plan.predicted_peak_bytes
    assert difference(before, after) == 0.0


class Adversarial(Points):
    """A generator and a discriminator in turn, each with a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        # no list of modules, which would be blocks
        for i in range(6):
            setattr(self, f"makes{i}", nn.Linear(64 if i else 3, 64))
            setattr(self, f"judges{i}", nn.Linear(64 if i else 3, 64))
        self.turn, self.score = nn.Linear(64, 3), nn.Linear(64, 1)

    def _through(self, x: Tensor, name: str) -> Tensor:
        for i in range(6):
            x = functional.gelu(getattr(self, f"{name}{i}")(x))
        return self.turn(x) if name == "makes" else self.score(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for sign in (1, -1):
            made = self._through(batch.flip(-1), "makes")
            # the discriminator is not to train the generator
            loss = sign * self._through(made if sign > 0 else made.detach(), "judges").mean()
            if sign < 0:
                loss = loss + functional.softplus(self._through(batch, "judges")).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


@pytest.mark.full
@pytest.mark.long
def test_each_of_several_backward_passes_frees_what_was_saved_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all of them save is never there at once: a bound for its sum made more run again than had to."""
    monkeypatch.setitem(MODELS, "pair", (Adversarial, lambda n: torch.rand(4 * n, 100, 3)))
    before, peak = plain("pair")
    for share in (0.85, 0.65):
        after, metered, plan = fit("pair", AMPStrategy(device_memory=int(share * peak)), steps=2)
        assert plan.strategies == ("replay",)
        assert 0.9 * share * peak <= metered.live.peak <= plan.predicted_peak_bytes <= share * peak
        assert difference(before, after) == 0.0


class Balanced(Adversarial):
    """Weighs two losses by gradients that are taken before, while the graph of both stays."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = [self._through(x, "judges").square().mean() for x in (batch, batch.flip(-1))]
        sizes = [torch.autograd.grad(loss, self.score.weight, retain_graph=True)[0].norm() for loss in losses]
        return losses[0] / sizes[0] + losses[1] / sizes[1]


def test_a_backward_pass_that_keeps_its_graph_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "balanced", (Balanced, lambda n: torch.rand(4 * n, 100, 3)))
    before, peak = plain("balanced")
    after, metered, plan = fit("balanced", AMPStrategy(strategies="replay"), steps=2)
    assert metered.live.peak <= plan.predicted_peak_bytes < 0.5 * peak
    assert difference(before, after) == 0.0


def test_a_function_in_the_place_of_the_step_is_called_without_the_module() -> None:
    one, other = nn.Identity(), nn.Linear(1, 1)
    one.extra_repr = lambda batch: batch  # type: ignore[method-assign, assignment]
    # Lightning looks whether a step takes the number of its batch
    assert list(inspect.signature(MethodType(method_of(one, "extra_repr"), one)).parameters) == ["batch"]
    for put, expected in ((lambda *given: given, (1, 2)), (other.extra_repr, other.extra_repr())):
        one.extra_repr = put
        assert method_of(one, "extra_repr")(one, *(expected if isinstance(expected, tuple) else ())) == expected


class Compiled(Points):
    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.compile(self.enter)


class Transformed(Points):
    def loss(self, batch: Tensor) -> Tensor:
        grad = torch.func.grad(lambda x: self.enter(x).sin().sum())(batch)
        return super().loss(batch) + grad.square().mean()  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_what_is_not_supported_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = MODELS["points"][1]
    for kind, why in ((Compiled, "torch.compile"), (Transformed, "torch.func")):
        monkeypatch.setitem(MODELS, "points", (kind, batches))
        with pytest.raises(AmpError, match=why):
            fit("points", AMPStrategy(strategies="replay"), steps=2)


ALL = 10**9


def replayed(
    make: Callable[[], Any], ends: Sequence[tuple[int, int]], keeps: Sequence[int] = ()
) -> tuple[list[Any], int]:
    """What `trained` returns of replayed steps, and the operators of a step."""
    tapes = list[Tape]()

    @contextmanager
    def inside(parameters: Any, first: bool) -> Iterator[None]:
        # as in a fit, of which the first step is compared
        with Tape(ends, keeps=keeps, compares=first) as tape, tape.hooks():
            tapes.append(tape)
            yield

    return trained(make, inside), tapes[-1].at


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_every_step_is_the_same_wherever_segments_end() -> None:
    choose, wrong = random.Random(1), list[str]()
    for name, make in CASES.items():
        plain = trained(make)
        whole, n = replayed(make, [(ALL, True)])
        tries: list[tuple[tuple[int, int], ...]] = [((ALL, True),)]
        for k in (1, 2, 4, 8):
            cuts = sorted(choose.sample(range(1, n + 1), min(k, n)))
            tries.append((*((cut, choose.choice((KEPT, *2 * (AT_ONCE, ONE_BY_ONE)))) for cut in cuts), (ALL, True)))
        tries.append(((ALL, ONE_BY_ONE),))
        found = (whole if ends == tries[0] else replayed(make, ends)[0] for ends in tries)
        wrong += [f"{name} {ends}" for ends, one in zip(tries, found, strict=True) if not equal(plain, one)]
        for ends in tries[1:]:
            # also the results of operators that draw, write or are views
            keeps = choose.sample(range(n), n // choose.choice((2, 4, 8)))
            wrong += [f"{name} {ends} {keeps}"] * (not equal(plain, replayed(make, ends, keeps)[0]))
    assert not wrong


def sines() -> Callable[[], Tensor]:
    """A step that saves 25 tensors of 512 x 64 numbers."""
    w = weight(64, 64)

    def step() -> Tensor:
        h = rows(512, 64) @ w
        for _ in range(8):
            h = (h.sin() @ w).cos()
        return h.sum()

    return step


def test_a_replayed_stretch_keeps_nothing_that_it_has_made() -> None:
    step = sines()
    held = dict[str, int]()
    with Tape([(ALL, True)]) as tape:
        step()
    for name, ends in (("plain", []), ("replayed", [(tape.at // 2, True), (tape.at, True)])):
        with LiveBytes() as live, Tape(ends) as tape, tape.hooks():
            loss = step()
            held[name] = live.current
        loss.backward()
    # the rows of the batch, and what lies across the one cut
    assert held["replayed"] <= 3 * 512 * 64 * 8 < held["plain"] / 5
    # tensors that run again one by one are held one by one
    held = dict[int, int]()
    for kind in (AT_ONCE, ONE_BY_ONE):
        with Tape([(ALL, kind)]) as tape, tape.hooks():
            loss = step()
        with LiveBytes() as live:
            loss.backward()
            held[kind] = live.peak
    # what an operator reads and makes, and its gradient, of a step that saves 25 of the kind
    assert held[ONE_BY_ONE] <= 6 * 512 * 64 * 8 < held[AT_ONCE] / 3


def test_what_no_replay_needs_is_freed_at_the_end_of_a_segment() -> None:
    w = weight(64, 64)
    # the second product is kept, and read by a sum that leads to no saved tensor
    with Tape([(7, AT_ONCE)], keeps={4}) as tape, tape.hooks():
        hidden = rows(512, 64) @ w
        product = hidden.detach() @ w.detach()
        memory, total = weakref.ref(product.untyped_storage()), product + 1
        del product
        assert memory() is not None
        loss = (hidden.sin() + total).sum()
    assert memory() is None
    loss.backward()


def test_a_result_without_a_backward_pass_is_freed() -> None:
    """Of a head that is not in the loss: its tanh saves what it returns."""
    w, left = weight(64, 64), dict[Any, bool]()
    for kind in (KEPT, AT_ONCE, ONE_BY_ONE):
        with Tape([(ALL, kind)]) as tape, tape.hooks():
            hidden = rows(512, 64) @ w
            unused = hidden.tanh()
            memory = weakref.ref(unused.untyped_storage())
            hidden.sum().backward()
        del hidden, unused, tape
        left[kind] = memory() is not None
    assert not any(left.values()), left


def test_what_nobody_can_replay_fails_as_it_does_without() -> None:
    w = weight(8, 8)

    def written_after_it_was_saved() -> Tensor:
        h = (rows(4, 8) @ w).exp()
        y = h.sin()
        h.mul_(2)
        return (y @ w).sum()

    def batch_written() -> Tensor:
        x = rows(4, 8)
        y = (x @ w).sin()
        x.mul_(2)
        return y.sum()

    for step in (written_after_it_was_saved, batch_written):
        with pytest.raises(RuntimeError, match="inplace"):
            step().backward()
        for ends in ([(ALL, True)], [(3, True), (ALL, True)], [(4, True), (ALL, True)], [(ALL, False)]):
            with Tape(ends) as tape, tape.hooks():
                loss = step()
            with pytest.raises(ModelError, match="changed in place"):
                loss.backward()


def test_a_write_between_the_step_and_its_backward_pass_is_refused() -> None:
    w, target = weight(8, 8), weight(8, 8, seed=4).detach()
    with Tape([(ALL, AT_ONCE)]) as tape, tape.hooks():
        with torch.no_grad():
            aim = rows(4, 8) @ target
        loss = ((rows(4, 8) @ w).sin() - aim).square().sum()
    # a target network that follows, in a hook
    target.lerp_(w.detach(), 0.5)
    del aim
    with pytest.raises(ModelError, match="changed in place"):
        loss.backward()


def test_a_write_at_the_end_of_a_step_is_refused() -> None:
    w = weight(8, 8)
    with Tape([(ALL, AT_ONCE)]) as tape, tape.hooks():
        h = (rows(4, 8) @ w).exp()
        loss = h.sum()
        h.detach().mul_(2)
    with pytest.raises(ModelError, match="changed in place"):
        loss.backward()


class Unseen(torch.autograd.Function):
    """Computes by NumPy, in memory that torch has made: of zeros, or of nothing."""

    make: Callable[[Tensor], Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = Unseen.make(x)
        y.numpy()[:] = np.exp(x.detach().numpy())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [torch.zeros_like, torch.empty_like])
def test_writes_that_torch_does_not_see_are_refused(
    make: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unseen, "make", staticmethod(make), raising=False)
    w = weight(8, 8)
    with Tape([(ALL, True)], compares=True) as tape, tape.hooks():
        loss = Unseen.apply(rows(4, 8) @ w).sum()  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match="torch does not see"):
        loss.backward()
    assert w.grad is None, "nothing was trained"
