"""Choose which blocks are recomputed or run in chunks: the least extra time under a byte budget, exactly.

Dynamic programming over the blocks in the order of their forward passes. What the blocks so far hold is one number of
bytes, and bounds on the bytes at a moment are bounds on it from above: of two choices for the blocks so far, one that
holds no fewer bytes and takes no less time than the other is never needed. What is left is a frontier of (bytes,
seconds). Choices are compared only if they agree in what later blocks and moments ask of them besides the bytes: which
shared tensors are held already, and what was decided for a block that is called again.

The frontier has at most as many points as there are choices, and in practice few: equal blocks add one point each.
Where it exceeds `MOST_POINTS`, points whose times differ by less than 1 / MOST_POINTS of the time of all forward passes
become one, with the least bytes of them; the result then still fits, and takes that much longer per block at most.

Blocks that are called again later multiply what has to be told apart: an encoder of 12 blocks that two views of a batch
pass has 2^12 combinations of decisions after the first view. Where there are more than `MOST_KEYS`, those are followed
whose choices are the best in bytes and seconds once the later calls of the decided blocks are added. The result still
fits; it may take longer than the best one, and the least peak may be missed.

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
"""Combinations that are followed side by side."""
CLOSE = 0.002
"""Part of the peak to which the least is found."""
Key = frozenset[int | tuple[str, int]]
"""Shared tensors that are held, and blocks that are not as they are with their forms, as far as it matters later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FormChoice:
    """Blocks that are not as they are, with their forms, and what follows from it for a step."""

    forms: dict[str, int]
    peak_bytes: int
    extra_seconds: float

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Blocks that are computed again."""
        return tuple(name for name, form in self.forms.items() if form == RECOMPUTED)


def choose(chain: Chain, budget_bytes: int, *, recompute: bool = True, chunk: bool = False) -> FormChoice | None:
    """The forms of blocks with which the step's peak is within the budget, at the least extra time.

    Args:
        chain: The step.
        budget_bytes: Bound of its peak.
        recompute: Whether blocks may be computed again.
        chunk: Whether they may run in chunks.

    Returns:
        None where no choice is within the budget.

    Raises:
        PlanError: A budget that is no number of bytes.
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
    """The choice of the least peak, which no budget below `at_least` has, up to a part CLOSE of it."""
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
    """Rules of a technique by which blocks run again, each once."""
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
    """Choices for the blocks so far: bytes held, extra seconds, the point of the blocks before, the last decision."""

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
        """The last place at which it matters whether a tensor is held, or what was decided for a block."""
        last: dict[int | str, int] = {}
        for i, block in enumerate(self._chain.blocks):
            in_chunks = (k for form in block.chunks for k in form.keeps)
            last.update(dict.fromkeys((*block.keeps, *block.inputs, *in_chunks, block.fqn), i))
        for moment in self._chain.moments:
            for k in moment.alive:
                last[k] = max(last.get(k, 0), moment.after)
        return last

    def _forms_of_blocks(self, *, chunk: bool) -> list[tuple[int, ...]]:
        """The forms that a block may have; () where that was decided at an earlier call of it."""
        seen, found = set[str](), list[tuple[int, ...]]()
        for block in self._chain.blocks:
            again = (RECOMPUTED,) if block.fqn in self._names else ()
            some = enumerate(block.chunks if chunk else (), CHUNKED)
            in_chunks = (n for n, form in some if again or not form.again)
            found.append(() if block.fqn in seen else (KEPT, *again, *in_chunks))
            seen.add(block.fqn)
        return found

    def best(self) -> dict[str, int] | None:
        """Blocks that are not as they are, with their forms; None where nothing fits."""
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
        """All points of the blocks before, with each form of block i."""
        block, offset = self._chain.blocks[i], 0
        for key, before in found.items():
            place = np.arange(offset, offset + len(before.n_bytes))
            offset += len(place)
            # no moment has blocks on both sides of such a place: bytes and tensors held by those before it are
            # forgotten, decisions for blocks that are called again are not
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
                # a moment with `after` i + 1 counts the blocks up to this one, all of which are decided now
                yield new_key, self._within(points, self._by_place[i + 1], new_key)

    def _within(self, points: _Points, moments: Sequence[ChainMoment], key: Collection[Any]) -> _Points:
        fits = self._mask(points.n_bytes, moments, key)
        return _Points(points.n_bytes[fits], points.seconds[fits], points.before[fits], points.form[fits])

    def _mask(self, n_bytes: Any, moments: Sequence[ChainMoment], key: Collection[Any]) -> Any:
        """Which points fit at all of some moments."""
        most = max((self._beside(moment, key) for moment in moments), default=None)
        return n_bytes >= 0 if most is None else n_bytes + most <= self._budget

    def _beside(self, moment: ChainMoment, key: Collection[Any]) -> int:
        return moment.n_bytes + sum(self._chain.tensors[k] for k in moment.alive if k not in key)

    def _merge(self, found: Iterable[tuple[Key, _Points]], i: int) -> dict[Key, _Points]:
        """Leave out what does not matter any more, and points that another one is never worse than."""
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
            # from the fewest bytes on, seconds fall: the first point of a rounded time is the one with the least bytes
            coarse = np.ceil(seconds[order] * (MOST_POINTS / total))
            order = order[np.concatenate([[True], coarse[1:] < coarse[:-1]])]
        before = np.concatenate([p.before for p in parts])
        form = np.concatenate([p.form for p in parts])
        return _Points(n_bytes[order], seconds[order], before[order], form[order])

    def _promising(self, found: dict[Key, _Points], i: int) -> dict[Key, _Points]:
        """About `MOST_KEYS` of the combinations: of the frontier of all points, then of what is left without these."""
        later = {k: self._later(*k, i) for k in set().union(*found) if not isinstance(k, int)}
        # in one order in every process, for the sum of seconds depends on it
        decided = [sorted(k for k in key if not isinstance(k, int)) for key in found]
        more = [np.array([later[k] for k in key]).reshape(-1, 2).sum(0) for key in decided]
        n_bytes = np.concatenate([p.n_bytes + n for p, (n, _) in zip(found.values(), more, strict=True)])
        seconds = np.concatenate([p.seconds + n for p, (_, n) in zip(found.values(), more, strict=True)])
        owner = np.repeat(np.arange(len(found)), [len(points.n_bytes) for points in found.values()])
        # with everything as it is, which a budget of all it takes has to find
        kept, left = {n for n, key in enumerate(decided) if not key}, np.arange(len(owner))
        while (room := MOST_KEYS - len(kept)) > 0:
            front = left[_best(n_bytes[left], seconds[left])]
            # of ranges of bytes the fastest choice, and the leanest of all: a budget may need any of them
            place = (n_bytes[front] - n_bytes[front[0]]) * room // (np.ptp(n_bytes[front]) + 1)
            fastest = np.append(place[1:] != place[:-1], True)
            fastest[0] = True
            kept.update(owner[front[fastest]].tolist())
            left = left[~np.isin(owner[left], list(kept))]
        return {key: points for n, (key, points) in enumerate(found.items()) if n in kept}

    def _later(self, fqn: str, form: int, i: int) -> tuple[int, float]:
        """Bytes and seconds that a decided form adds to the later calls of its block."""
        blocks = [block for block in self._chain.blocks[i + 1 :] if block.fqn == fqn]
        n_bytes = sum(self._alone(block, form) - self._alone(block, KEPT) for block in blocks)
        return n_bytes, sum(block.extra_seconds(form) for block in blocks)

    def _alone(self, block: BlockCost, form: int) -> int:
        saved, tensors = block.held(form)
        return saved + sum(self._chain.tensors[k] for k in tensors)

    def _trace(self, place: int) -> dict[str, int]:
        """The decisions that led to a point, in the order of the blocks."""
        forms: dict[str, int] = {}
        for block, (before, form) in reversed(list(zip(self._chain.blocks, self._history, strict=True))):
            forms[block.fqn] = int(form[place])
            place = int(before[place])
        return {fqn: form for fqn, form in reversed(forms.items()) if form != KEPT}


def _best(n_bytes: Any, seconds: Any) -> Any:
    """Places of the points that no other one is better than, from the fewest bytes on."""
    order = np.lexsort((seconds, n_bytes))
    least = np.minimum.accumulate(seconds[order])
    return order[np.concatenate([[True], least[1:] < least[:-1]])[: len(order)]]


def _decided(fqn: str, key: Key) -> int:
    """The form that a block was given at an earlier call."""
    return next((k[1] for k in key if not isinstance(k, int) and k[0] == fqn), KEPT)
