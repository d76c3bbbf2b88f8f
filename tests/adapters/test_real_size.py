"""Claim: a copy of HiGLUE's decoder that differs at its real size alone is not taken for it, and is not trained as it.

Paddings, masks, numbers and buffers that a small example does not reach. What only a real batch shows (a v longer than
the anchors, many cells, sizes of parameters) is refused with the first one.
"""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_amp.adapters.adapt import adapt
from lightning_amp.adapters.recognise import real_size
from lightning_amp.adapters.recognise.real_size import needed_bytes
from lightning_amp.errors import ModelError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.parallel.contract.stand_in import in_place_of
from tests.adapters import foreign_cases
from tests.adapters.higlue_shaped import Copy, Decoder, Foreign

BASE = Copy()
LONG = Copy(anchors=60)
STRATA = (*range(2, 13), 31, 32)


def base(strata: int) -> Copy:
    return Copy(strata=strata, anchors=strata + 57, window=5, dim=4)


class Changed(Decoder):
    """What comes out of one layer is changed, or what goes in."""

    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.reach = kind.strata + 50
        self.register_buffer("keep", (torch.arange(kind.anchors) < self.reach).double()[:, None])
        self.register_buffer("index", torch.arange(kind.anchors).clamp_max(self.reach))
        self.plain = (torch.arange(kind.anchors) >= self.reach).double()[:, None] + 1


class Attending(Changed):
    """Attention by the package, called in another way."""

    def key(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        if k == 0:
            return v, v
        i = k - 1
        p = self.prenorm_layers[i](v)
        qk, value = self.key_layers[i](p), self.value_layers[i](p)
        key = value + self.attend(self.attn_layers[i], qk, p)
        return key + self.ff_activations[i](self.ff_layers[i](self.postnorm_layers[i](key))), v

    def attend(self, layer: Any, qk: Tensor, p: Tensor) -> Tensor:
        raise NotImplementedError


class MaskOfOnes(Attending):
    def attend(self, layer: Any, qk: Tensor, p: Tensor) -> Tensor:
        mask = torch.ones(1, len(p), dtype=torch.bool)
        return layer(qk[None], qk[None], p[None], mask=mask)[0]  # type: ignore[no-any-return]


class MaskOfTheReal(Attending):
    def attend(self, layer: Any, qk: Tensor, p: Tensor) -> Tensor:
        fill = -len(p) % layer.window_size
        place = torch.arange(len(p) + fill)[None]
        qk, p = (nn.functional.pad(t, (0, 0, 0, fill)) for t in (qk, p))
        mask = (place < self.reach) | (place >= len(p) - fill)
        out: Tensor = layer(qk[None], qk[None], p[None], mask=mask)[0]
        return out[: len(p) - fill]


class Filled(Attending):
    """The last bucket is filled by hand."""

    def fill(self, rows: Tensor, n: int) -> Tensor:
        raise NotImplementedError

    def attend(self, layer: Any, qk: Tensor, p: Tensor) -> Tensor:
        n = -len(p) % layer.window_size
        longer = [torch.cat([rows, self.fill(rows, n)]) for rows in (qk, p)]
        return layer(longer[0][None], longer[0][None], longer[1][None])[0][: len(p)]  # type: ignore[no-any-return]


class LastRow(Filled):
    def fill(self, rows: Tensor, n: int) -> Tensor:
        return rows[-1:].expand(n, -1)


class FirstRow(Filled):
    def fill(self, rows: Tensor, n: int) -> Tensor:
        return rows[:1].expand(n, -1)


class Mirrored(Filled):
    def fill(self, rows: Tensor, n: int) -> Tensor:
        return rows.flip(0)[:n]


class Mean(Filled):
    def fill(self, rows: Tensor, n: int) -> Tensor:
        return rows.mean(0, keepdim=True).expand(n, -1)


class Ones(Filled):
    def fill(self, rows: Tensor, n: int) -> Tensor:
        return torch.ones_like(rows[:1]).expand(n, -1)


class FilledInFront(Attending):
    def attend(self, layer: Any, qk: Tensor, p: Tensor) -> Tensor:
        n = -len(p) % layer.window_size
        qk, p = (nn.functional.pad(rows, (0, 0, n, 0)) for rows in (qk, p))
        return layer(qk[None], qk[None], p[None])[0][n:]  # type: ignore[no-any-return]


class NotPadded(Decoder):
    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        for layer in self.attn_layers:
            layer.autopad = False


class CutOff(Attending):
    """Rows that fill no bucket are left as they are."""

    def attend(self, layer: Any, qk: Tensor, p: Tensor) -> Tensor:
        n = len(p) - len(p) % layer.window_size
        out = layer(qk[None, :n], qk[None, :n], p[None, :n])[0]
        return torch.cat([out, p[n:]])


Rows = Callable[[Changed, Tensor], Tensor]


def rows(change: Rows, name: str) -> type[Changed]:
    """A decoder that changes v."""

    def forward(self: Changed, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        return Decoder.forward(self, u, change(self, v), b, l)

    return type(name, (Changed,), {"forward": forward})


def zeroed(self: Changed, v: Tensor) -> Tensor:
    return torch.cat([v[: self.reach], 0 * v[self.reach :]])


def frozen(self: Changed, v: Tensor) -> Tensor:
    """Gradients alone tell."""
    return torch.cat([v[: self.reach], v[self.reach :].detach()])


def doubled_gradient(self: Changed, v: Tensor) -> Tensor:
    return torch.cat([v[: self.reach], 2 * v[self.reach :] - v[self.reach :].detach()])


def by_buffer(self: Changed, v: Tensor) -> Tensor:
    return v * self.keep[: len(v)]


def by_attribute(self: Changed, v: Tensor) -> Tensor:
    return v * self.plain[: len(v)]


def by_index(self: Changed, v: Tensor) -> Tensor:
    return v[self.index[: len(v)]]


def by_size(self: Changed, v: Tensor) -> Tensor:
    return v * 1.001 if len(v) > self.reach else v


def by_position(self: Changed, v: Tensor) -> Tensor:
    return v + 1e-3 * (torch.arange(len(v)) - self.reach).clamp_min(0)[:, None]


def rolled(self: Changed, v: Tensor) -> Tensor:
    return torch.cat([v[: self.reach], v[self.reach :].roll(1, 0)])


def normed(self: Changed, v: Tensor) -> Tensor:
    return torch.cat([v[: self.reach], nn.functional.normalize(v[self.reach :], dim=1)])


class LastStratum(Changed):
    """The last anchor of the real ones alone, in the last stratum alone."""

    def key(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        key, v = super().key(k, v)
        if k == self.copy.strata - 1 and len(v) > self.reach:
            key = torch.cat([key[: self.reach], 1.01 * key[self.reach :]])
        return key, v


class Columns(Changed):
    """Scores of features that no small example has."""

    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        many = len(v) > self.reach
        return super().forward(u * 1.01 if many else u, v, b, l)


PADDINGS = (MaskOfOnes, LastRow, FirstRow, Mirrored, Mean, Ones, FilledInFront, NotPadded, CutOff)
BEYOND = (
    MaskOfTheReal,
    LastStratum,
    Columns,
    *(
        rows(change, change.__name__)
        for change in (
            zeroed,
            frozen,
            doubled_gradient,
            by_buffer,
            by_attribute,
            by_index,
            by_size,
            by_position,
            rolled,
            normed,
        )
    ),
)


def noted(kind: type, copy: Copy) -> list[str]:
    module = Foreign(copy)
    module.decoder = kind(copy).double()
    found = adapt(module)
    assert bool(found.decoders) is not bool(found.notes)
    return found.notes


MORE = [pytest.mark.exhaustive, pytest.mark.release]
KINDS = (*PADDINGS, *BEYOND)
# every padding and everything beyond the small examples, each with another number of strata; all of them at K = 4
TURNS = [
    *zip(KINDS, itertools.cycle(STRATA[::-1]), strict=False),
    *(pytest.param(kind, 4, marks=MORE) for kind in KINDS),
]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize(("kind", "strata"), TURNS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_copy_that_differs_in_what_a_small_example_does_not_reach_is_refused(
    kind: type, strata: int
) -> None:
    (note,) = noted(kind, base(strata))
    if kind is NotPadded:
        assert "autopad=False where ours has True" in note
    if kind in BEYOND:
        assert "in the strata" in note
        assert "at its real size" in note


@pytest.mark.long
@pytest.mark.parametrize(
    "strata", [k if k in (2, 3, 7, 12, 32) else pytest.param(k, marks=MORE) for k in STRATA]
)
def test_the_decoder_itself_is_recognised_for_every_number_of_strata(strata: int) -> None:
    assert noted(Decoder, base(strata)) == []


def test_a_warning_is_no_reason_not_to_recognise_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    make_dual = forward_ad.make_dual

    def deprecated(*args: Any) -> Any:
        warnings.warn("`torch.jit.script` is deprecated", FutureWarning, stacklevel=1)
        return make_dual(*args)  # type: ignore[no-untyped-call]

    def warns(self: Changed, v: Tensor) -> Tensor:
        warnings.warn("a library of the module's", UserWarning, stacklevel=1)
        return v

    monkeypatch.setattr(forward_ad, "make_dual", deprecated)
    assert noted(rows(warns, "warns"), base(4)) == [], "where warnings are errors, as in these tests"


def test_a_comparison_that_fails_is_an_error_where_a_decoder_may_be_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(self: Changed, v: Tensor) -> Tensor:
        assert len(v) <= self.reach, "at the real size alone"
        return v

    def any_size(self: Changed, v: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    def no_forward_mode(*args: Any) -> Any:
        raise NotImplementedError("forward mode")

    for change, found in (
        (short, "AssertionError"),
        (any_size, "RuntimeError"),
        (None, "NotImplementedError"),
    ):
        module = Foreign(base(4))
        if change is None:
            monkeypatch.setattr(forward_ad, "make_dual", no_forward_mode)
        else:
            module.decoder = rows(change, change.__name__)(base(4)).double()
        with pytest.raises(ModelError, match=rf"fails where it is compared with ours, with {found}.*'S1'"):
            adapt(module)
        (note,) = adapt(module, needed=False).notes
        assert found in note
    # named techniques that change no decoder train it as any other module
    state = foreign_cases.trained(module, foreign_cases.batches(base(4))[:1], "S1")
    assert set(state) == set(module.state_dict())


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"causal": True}, "causal=True where ours has False, look_forward=0 where ours has 1"),
    ({"look_backward": 2}, "look_backward=2 where ours has 1"),
    ({"look_forward": 0}, "look_forward=0 where ours has 1"),
    ({"exact_windowsize": True}, "exact_windowsize=True where ours has False"),
    ({"use_xpos": True}, "use_xpos=True where ours has False"),
    ({"scale": 1.0}, "scale=1.0 where ours has None"),
    ({"dropout": 0.1}, "dropout=0.1 where ours has none"),
    ({"shared_qk": False}, "shared_qk=False where ours has True"),
    ({"use_rotary_pos_emb": False}, "no rotary positions"),
]


@pytest.mark.parametrize(
    ("setting", "said"), SETTINGS, ids=lambda v: next(iter(v)) if isinstance(v, dict) else ""
)
def test_a_refusal_names_the_setting_of_attention_that_differs(setting: dict[str, Any], said: str) -> None:
    class Other(Decoder):
        def __init__(self, kind: Copy) -> None:
            super().__init__(kind)
            usual = {"dim": kind.dim, "window_size": kind.window, "autopad": True, "shared_qk": True}
            self.attn_layers = nn.ModuleList(
                type(layer)(**{**usual, **setting}) for layer in self.attn_layers
            )

    (note,) = noted(Other, BASE)
    assert f"its attention has {said}" in note


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale_lin = nn.Parameter(torch.zeros(1, 3))
        self.value_layers = nn.ModuleList()
        self.strata_masks = [[0, 1, 2]]


def test_a_module_with_half_of_the_parts_is_told_what_it_lacks() -> None:
    (note,) = adapt(nn.ModuleDict({"decoder": Half()})).notes
    assert "'decoder' looks like a decoder of HiGLUE's shape" in note
    assert "because it has no feature_masks" in note
    (note,) = adapt(Decoder(BASE)).notes
    assert "'Decoder' looks like" in note
    assert "is the LightningModule itself" in note


class Longer(Foreign):
    """v has rows that no feature has, and the decoder does something with them."""

    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.decoder = rows(by_rows, "by_rows")(kind).double()
        self.anchors = nn.Parameter(torch.cat([self.anchors.detach(), torch.ones(3, kind.dim)]))


def by_rows(self: Changed, v: Tensor) -> Tensor:
    return v * 1.001 if len(v) > self.copy.anchors else v


class Crowded(Foreign):
    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.decoder = ManyCells(kind).double()


class ManyCells(Decoder):
    def forward(self, u: Tensor, v: Tensor, b: Tensor, l: Tensor) -> Any:  # noqa: E741
        return super().forward(u * 1.001 if len(u) == 6 else u, v, b, l)


@pytest.mark.parametrize("kind", [Longer, Crowded])
@pytest.mark.parametrize("strategies", ["S1,stream", "S1,fused"])
def test_what_only_a_real_batch_shows_is_refused_before_a_step(kind: Any, strategies: str) -> None:
    module = kind(LONG)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(
        ModelError, match=r"another log-probability in the strata .* on the first batch, of 6 cells"
    ):
        foreign_cases.trained(module, foreign_cases.batches(LONG)[:2], strategies)
    state = module.decoder.state_dict()
    assert all(torch.equal(before[f"decoder.{name}"], value) for name, value in state.items())


def by_rows_backward(self: Changed, v: Tensor) -> Tensor:
    return v + 0.001 * (v - v.detach()) if len(v) > self.copy.anchors else v


class LongerBackward(Longer):
    """A longer v changes gradients alone."""

    def __init__(self, kind: Copy) -> None:
        super().__init__(kind)
        self.decoder = rows(by_rows_backward, "by_rows_backward")(kind).double()


def test_the_first_batch_is_compared_in_derivatives_only_where_v_has_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, directed = [], real_size._directed
    monkeypatch.setattr(real_size, "_directed", lambda *given: taken.append(given) or directed(*given))
    foreign_cases.trained(Foreign(LONG), foreign_cases.batches(LONG)[:2], "S1,stream")
    assert len(taken) == 1, "once, before there is a plan"
    with pytest.raises(ModelError, match=r"another gradient in the strata .* on the first batch"):
        foreign_cases.trained(LongerBackward(LONG), foreign_cases.batches(LONG)[:2], "S1,stream")
    assert len(taken) == 3


def test_a_longer_v_alone_is_fine() -> None:
    module = Longer(LONG)
    module.decoder = Decoder(LONG).double()
    module.decoder.load_state_dict(Foreign(LONG).decoder.state_dict())
    foreign_cases.trained(module, foreign_cases.batches(LONG)[:2], "S1,stream")


def test_no_random_number_is_used_up_and_nothing_changed_with_the_first_batch() -> None:
    module, given, x = foreign_cases.example(BASE)
    found = adapt(module)
    forward: Any = vars(module.decoder)["forward"]
    assert forward.first_batch.allow(usual=0, free=None) == ""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    with torch.inference_mode():
        module.decoder(*given).log_prob(x).sum()
    module.decoder(*given).log_prob(x).sum().backward()
    assert forward.first_batch._calls == {(True, True)}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    found.undo()


def test_where_there_is_no_memory_the_plan_says_that_it_was_not_compared() -> None:
    strategy = AMPStrategy(strategies=["S1", "stream"], device_memory="500KiB")
    loader = torch.utils.data.DataLoader(foreign_cases.batches(LONG)[:2], batch_size=None)  # type: ignore[arg-type]
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = Trainer(**dict.fromkeys(quiet, False), accelerator="cpu", max_epochs=1, strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Foreign(LONG), loader)
    assert strategy.plan is not None
    assert strategy.plan.fits
    (note,) = (note for note in strategy.plan.notes if "is not compared with its own forward" in note)
    assert "'decoder' was recognised by small examples" in note


@pytest.mark.parametrize("kind", [Copy(dim=16, window=40, anchors=200), Copy(dim=4, window=3, anchors=100)])
def test_memory_of_a_comparison_is_within_what_is_said(kind: Copy) -> None:
    module, given, x = foreign_cases.example(replace(kind, strata=6))
    adapt(module)
    first: Any = vars(module.decoder)["forward"].first_batch
    first.cells = 6
    fixed, each = needed_bytes(module.decoder, in_place_of(module.decoder))  # type: ignore[arg-type]
    for first.derivatives, least in ((False, 0.15), (True, 0.3)):
        first._modes.clear()
        with LiveBytes() as live:
            first.look(given, x)
        assert least * (fixed + 6 * each) < live.peak <= fixed + 6 * each
