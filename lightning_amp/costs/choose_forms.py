"""Choose which blocks are recomputed or run in chunks: the minimum extra time under a byte budget, solved exactly.

The algorithm is dynamic programming over the blocks in the order of their forward passes. The state of the blocks so
far is the number of bytes that they hold, and memory limits at each moment are upper bounds on this number. Of two
choices for the blocks so far, one that holds no fewer bytes and takes no less time is never needed. The others form a
frontier of (bytes, seconds). Choices are compared only if they agree in what later blocks and moments depend on besides
the bytes: which shared tensors are held already, and the forms of blocks that are called again.

The frontier has at most as many points as there are choices, and in practice few: equal blocks add one point each. If
it exceeds `MOST_POINTS`, points whose times differ by less than 1 / MOST_POINTS of the time of all forward passes are
merged into the one with the least bytes; the result still fits, and takes at most that much longer per block.

Blocks that are called again later multiply the number of states: if two views of a batch pass through an encoder of 12
blocks, the first view leaves 2^12 combinations of decisions. With more than `MOST_KEYS` combinations, only those are
followed whose choices are best in bytes and seconds, including later calls of the decided blocks. The result still
fits; it may take longer than the optimum, and the least peak may be missed.

Source of the pruning: G. L. Nemhauser, Z. Ullmann: Discrete dynamic programming and capital allocation, 1969.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_amp.costs.profiled_step import LEAST_SECONDS
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.chain import CHUNKED, KEPT, RECOMPUTED, BlockCost, Chain, ChainMoment, extra_seconds
from lightning_amp.footprint.chain.chain import peak_bytes as peak_bytes
from lightning_amp.quantities import format_bytes, format_seconds

MOST_POINTS = 10_000
MOST_KEYS = 64
"""Most combinations of decisions that are followed."""
CLOSE = 0.002
"""Relative tolerance in the search for the least peak."""
Key = frozenset[int | tuple[str, int]]
"""Held tensors by index, and (name, form) of decided blocks that are not kept, if later blocks depend on them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FormChoice:
    """Blocks with a form other than KEPT, and the effect on the step."""

    forms: dict[str, int]
    peak_bytes: int
    extra_seconds: float

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the blocks that are recomputed."""
        return tuple(name for name, form in self.forms.items() if form == RECOMPUTED)


def choose(chain: Chain, budget_bytes: int, *, recompute: bool = True, chunk: bool = False) -> FormChoice | None:
    """Choose the forms of blocks with the least extra time for which the step's peak is within the budget.

    Args:
        chain: The blocks of the step.
        budget_bytes: Bound of the peak.
        recompute: Whether blocks may be recomputed.
        chunk: Whether blocks may run in chunks.

    Returns:
        None if no choice is within the budget.

    Raises:
        PlanError: The budget is not a number of bytes.
    """
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 0:
        raise PlanError(
            f"budget_bytes={budget_bytes!r} is not supported; allowed is a whole number of bytes, 0 or more"
        )
    forms = _FormSearch(chain, budget_bytes, recompute=recompute, chunk=chunk).best()
    if forms is None:
        return None
    return FormChoice(forms=forms, peak_bytes=peak_bytes(chain, forms), extra_seconds=extra_seconds(chain, forms))


def leanest(chain: Chain, *, recompute: bool = True, chunk: bool = False, at_least: int = 0) -> FormChoice:
    """Choose the least peak, within a tolerance of CLOSE; budgets below `at_least` are known to be too small."""
    low, best = at_least, choose(chain, peak_bytes(chain, ()), recompute=recompute, chunk=chunk)
    assert best is not None, "every block as it is takes as much"
    high = best.peak_bytes
    while high - low > max(1, CLOSE * high):
        middle = (low + high) // 2
        found = choose(chain, middle, recompute=recompute, chunk=chunk)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, found.peak_bytes)
    return best


def rules_again(strategy: str, spec: Spec, chain: Chain, names: Sequence[str]) -> tuple[Rule, ...]:
    """Return a rule for each block that runs again, without duplicates."""
    found = []
    for name in names:
        calls = [block for block in chain.blocks if block.fqn == name]
        saved, seconds = sum(c.saved_bytes for c in calls), sum(c.forward_seconds for c in calls)
        why = (
            f"{len(names)} of {len(chain.names)} blocks are computed again, this one keeps {format_bytes(saved)} less"
            f" and takes {format_seconds(max(seconds, LEAST_SECONDS))} more"
        )
        found.append(Rule(strategy=strategy, fqn=name, spec=spec, why=why, saves_bytes=saved))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Points:
    """Choices for the blocks so far: bytes held, extra seconds, index of the previous point, last decision."""

    n_bytes: Any
    seconds: Any
    before: Any
    form: Any


class _FormSearch:
    """One run of the dynamic program."""

    def __init__(self, chain: Chain, budget: int, *, recompute: bool, chunk: bool) -> None:
        self._chain, self._budget = chain, budget
        self._by_form: dict[tuple[int, int], list[ChainMoment]] = defaultdict(list)
        self._by_place: dict[int, list[ChainMoment]] = defaultdict(list)
        self._always: list[ChainMoment] = []
        for moment in chain.moments:
            if moment.block is None and moment.after == moment.first:
                self._always.append(moment)
            elif moment.block is None:
                self._by_place[moment.after].append(moment)
            else:
                assert moment.after == moment.block, "a form of a block needs memory together with the blocks before it"
                self._by_form[moment.block, moment.form].append(moment)
        self._starts = {moment.first for moment in chain.moments}
        self._last_use = self._last_uses()
        self._names = frozenset(chain.names if recompute else ())
        self._forms = self._forms_of_blocks(chunk=chunk)
        self._history: list[tuple[Any, Any]] = []

    def _last_uses(self) -> dict[int | str, int]:
        """Return the last block at which a held tensor, or the form of a block, matters."""
        last: dict[int | str, int] = {}
        for i, block in enumerate(self._chain.blocks):
            in_chunks = (k for form in block.chunks for k in form.keeps)
            last.update(dict.fromkeys((*block.keeps, *block.inputs, *in_chunks, block.fqn), i))
        for moment in self._chain.moments:
            for k in moment.alive:
                last[k] = max(last.get(k, 0), moment.after)
        return last

    def _forms_of_blocks(self, *, chunk: bool) -> list[tuple[int, ...]]:
        """Return the allowed forms of each block; () if an earlier call of the block decides."""
        seen, found = set[str](), list[tuple[int, ...]]()
        for block in self._chain.blocks:
            again = (RECOMPUTED,) if block.fqn in self._names else ()
            some = enumerate(block.chunks if chunk else (), CHUNKED)
            in_chunks = (n for n, form in some if again or not form.again)
            found.append(() if block.fqn in seen else (KEPT, *again, *in_chunks))
            seen.add(block.fqn)
        return found

    def best(self) -> dict[str, int] | None:
        """Return the blocks with a form other than KEPT; None if nothing fits."""
        if any(self._beside(moment, ()) > self._budget for moment in self._always):
            return None
        none = np.zeros(1, dtype=np.int64)
        found: dict[Key, _Points] = {frozenset(): _Points(none, np.zeros(1), none, none)}
        for i in range(len(self._chain.blocks)):
            found = self._merge(self._step(i, found), i)
            if not found:
                return None
        seconds = np.concatenate([points.seconds for points in found.values()])
        return self._trace(int(np.argmin(seconds)))

    def _step(self, i: int, found: dict[Key, _Points]) -> Iterable[tuple[Key, _Points]]:
        """Yield all points of the previous blocks, extended by each form of block i."""
        block, offset = self._chain.blocks[i], 0
        for key, before in found.items():
            place = np.arange(offset, offset + len(before.n_bytes))
            offset += len(place)
            # no moment has blocks on both sides of such a place: bytes and tensors held by earlier blocks are dropped,
            # but not the forms of blocks that are called again
            if i in self._starts:
                key = frozenset(k for k in key if not isinstance(k, int))
                before = _Points(before.n_bytes * 0, before.seconds, before.before, before.form)
            for form in self._forms[i] or (_decided(block.fqn, key),):
                at_work = self._mask(before.n_bytes, self._by_form[i, form], key)
                saved, tensors = block.held(form)
                holds = set(tensors) - key
                points = _Points(
                    before.n_bytes[at_work] + sum(self._chain.tensors[k] for k in holds) + saved,
                    before.seconds[at_work] + block.extra_seconds(form),
                    place[at_work],
                    np.full(int(at_work.sum()), form),
                )
                new_key = key | holds | ({(block.fqn, form)} if form != KEPT else frozenset())
                # a moment with `after` i + 1 counts the blocks up to this one, and all of them are decided now
                yield new_key, self._within(points, self._by_place[i + 1], new_key)

    def _within(self, points: _Points, moments: Sequence[ChainMoment], key: Collection[Any]) -> _Points:
        fits = self._mask(points.n_bytes, moments, key)
        return _Points(points.n_bytes[fits], points.seconds[fits], points.before[fits], points.form[fits])

    def _mask(self, n_bytes: Any, moments: Sequence[ChainMoment], key: Collection[Any]) -> Any:
        """Return a mask of the points that fit at all of the moments."""
        most = max((self._beside(moment, key) for moment in moments), default=None)
        return n_bytes >= 0 if most is None else n_bytes + most <= self._budget

    def _beside(self, moment: ChainMoment, key: Collection[Any]) -> int:
        return moment.n_bytes + sum(self._chain.tensors[k] for k in moment.alive if k not in key)

    def _merge(self, found: Iterable[tuple[Key, _Points]], i: int) -> dict[Key, _Points]:
        """Drop state that no longer matters, and dominated points."""
        alike: dict[Key, list[_Points]] = defaultdict(list)
        for key, points in found:
            later = frozenset(k for k in key if self._last_use[k if isinstance(k, int) else k[0]] > i)
            alike[later].append(points)
        merged = {key: self._frontier(points) for key, points in alike.items()}
        merged = {key: points for key, points in merged.items() if len(points.n_bytes)}
        if len(merged) > MOST_KEYS:
            merged = self._promising(merged, i)
        if merged:
            before = np.concatenate([points.before for points in merged.values()])
            form = np.concatenate([points.form for points in merged.values()])
            self._history.append((before, form))
        return merged

    def _frontier(self, parts: Sequence[_Points]) -> _Points:
        n_bytes = np.concatenate([p.n_bytes for p in parts])
        seconds = np.concatenate([p.seconds for p in parts])
        order = _best(n_bytes, seconds)
        if len(order) > MOST_POINTS:
            total = sum(block.forward_seconds for block in self._chain.blocks)
            # seconds fall as bytes grow: of points with the same rounded time, the first has the least bytes
            coarse = np.ceil(seconds[order] * (MOST_POINTS / total))
            order = order[np.concatenate([[True], coarse[1:] < coarse[:-1]])]
        before = np.concatenate([p.before for p in parts])
        form = np.concatenate([p.form for p in parts])
        return _Points(n_bytes[order], seconds[order], before[order], form[order])

    def _promising(self, found: dict[Key, _Points], i: int) -> dict[Key, _Points]:
        """Select about `MOST_KEYS` combinations: those on the frontier of all points, then of the rest, and so on."""
        later = {k: self._later(*k, i) for k in set().union(*found) if not isinstance(k, int)}
        # sorted, so that the sum of seconds is the same in every process
        decided = [sorted(k for k in key if not isinstance(k, int)) for key in found]
        more = [np.array([later[k] for k in key]).reshape(-1, 2).sum(0) for key in decided]
        n_bytes = np.concatenate([p.n_bytes + n for p, (n, _) in zip(found.values(), more, strict=True)])
        seconds = np.concatenate([p.seconds + n for p, (_, n) in zip(found.values(), more, strict=True)])
        owner = np.repeat(np.arange(len(found)), [len(points.n_bytes) for points in found.values()])
        # always keep the combination without decisions, which a budget for the unchanged step requires
        kept, left = {n for n, key in enumerate(decided) if not key}, np.arange(len(owner))
        while (room := MOST_KEYS - len(kept)) > 0:
            front = left[_best(n_bytes[left], seconds[left])]
            # per range of bytes the fastest choice, and the leanest of all: any budget may require one of them
            place = (n_bytes[front] - n_bytes[front[0]]) * room // (np.ptp(n_bytes[front]) + 1)
            fastest = np.append(place[1:] != place[:-1], True)
            fastest[0] = True
            kept.update(owner[front[fastest]].tolist())
            left = left[~np.isin(owner[left], list(kept))]
        return {key: points for n, (key, points) in enumerate(found.items()) if n in kept}

    def _later(self, fqn: str, form: int, i: int) -> tuple[int, float]:
        """Return the bytes and seconds that a decided form adds to later calls of its block."""
        blocks = [block for block in self._chain.blocks[i + 1 :] if block.fqn == fqn]
        n_bytes = sum(self._alone(block, form) - self._alone(block, KEPT) for block in blocks)
        return n_bytes, sum(block.extra_seconds(form) for block in blocks)

    def _alone(self, block: BlockCost, form: int) -> int:
        saved, tensors = block.held(form)
        return saved + sum(self._chain.tensors[k] for k in tensors)

    def _trace(self, place: int) -> dict[str, int]:
        """Return the decisions that led to a point, in the order of the blocks."""
        forms: dict[str, int] = {}
        for block, (before, form) in reversed(list(zip(self._chain.blocks, self._history, strict=True))):
            forms[block.fqn] = int(form[place])
            place = int(before[place])
        return {fqn: form for fqn, form in reversed(forms.items()) if form != KEPT}


def _best(n_bytes: Any, seconds: Any) -> Any:
    """Return the indices of the points that no other one dominates, by ascending bytes."""
    order = np.lexsort((seconds, n_bytes))
    least = np.minimum.accumulate(seconds[order])
    return order[np.concatenate([[True], least[1:] < least[:-1]])[: len(order)]]


def _decided(fqn: str, key: Key) -> int:
    """Return the form that an earlier call of a block was given."""
    return next((k[1] for k in key if not isinstance(k, int) and k[0] == fqn), KEPT)
