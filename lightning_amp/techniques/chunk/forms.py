"""Compute the chunked forms of the blocks of a training step, on first use.

Each distinct block is planned for up to `LEVELS` budgets, from its least bytes in chunks up to its bytes without
chunks. Each plan is a form. The difference between a form and the original block is computed from their tables
(techniques/chunk/regions), and added to the values of the block in the recorded step:

    saved_bytes   of the block + saved of the table in chunks - saved of the table
    at work       peak of the block + peak of the table in chunks - peak of the table
    seconds       three forward passes of the block, times the relative slowdown of the table in chunks, both at the
                  rates of the device that the plan is for

A block that can be recomputed has each form a second time, with recomputation: it then keeps its inputs only.

A form keeps its inputs, and those tensors that the block shares with others. The choice that is made with these numbers
is counted again with everything installed (plan_module.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_amp.costs.choose_forms import FormChoice, choose, leanest
from lightning_amp.footprint.chain.chain import CHUNKED, KEPT, RECOMPUTED, Chain, ChainMoment, ChunkForm, group_reasons
from lightning_amp.graph.peak import BlockBytes, block_bytes
from lightning_amp.graph.table import Table
from lightning_amp.techniques.chunk.regions.choose_chunks import CPU_SECONDS, CostModel, OverBudget, choose_chunks, rung
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.regions.region import ChunkPlan
from lightning_amp.techniques.technique import UNEXPECTED, result_or_reason

LEVELS = 5
"""Number of budgets that a block is planned for."""
ORDER = (0, 4, 2, 3, 1)
"""Order in which these budgets are planned, from 0 for the least bytes: the search may end before the last of them."""
WORK = 200_000
"""Steps of the search for regions, of all blocks of a step together: a few seconds. It is divided by their rows."""
SPARE = 1.03
"""Factor on the least bytes of a table: a rule's budget is checked by a count, which may exceed the table's."""
NEVER = 2**60
"""More bytes than any step takes."""
PASSES = 3
"""Time of a forward and a backward pass, in forward passes."""
SLOWEST = 2.0
"""Largest slowdown of a form that is used without need, relative to the original block."""
WORTH = 0.95
"""Largest share of the block's bytes that a form may take."""
Tables = Callable[[], Sequence[Table | str]]
"""Returns for every call of a block its table, or the reason why there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Level:
    """Plan of a table for one budget."""

    budget_bytes: int
    plan: ChunkPlan
    n_bytes: BlockBytes


class ChunkForms:
    """Chunked forms of the blocks of a step.

    Args:
        chain: The step without chunks.
        tables: Returns the tables of its blocks.
        costs: Quantity to minimize, with the rates of the device that the plan is for.
    """

    def __init__(self, chain: Chain, tables: Tables, costs: CostModel = CPU_SECONDS) -> None:
        self._plain, self.tables, self.costs = chain, tables, costs
        self._leanest: dict[tuple[bool, bool], FormChoice] = {}
        self._cut = set[int]()

    @property
    def known(self) -> bool:
        """Whether the forms have been computed."""
        return "_found" in vars(self)

    def in_step(self, chain: Chain) -> "ChunkForms":
        """Return the forms of the same blocks in a step that is otherwise changed, such as in its loss."""
        if chain is self._plain:
            return self
        found = ChunkForms(chain, self.tables, self.costs)
        found._found = self._found
        return found

    @cached_property
    def chain(self) -> Chain:
        """The step, with all forms."""
        tables = self._found[0]
        blocks, moments = [], list(self._plain.moments)
        for i, (block, table) in enumerate(zip(self._plain.blocks, tables, strict=True)):
            levels, plain = ([], None) if isinstance(table, str) else self._found[1][id(table)]
            if plain is None:
                blocks.append(block)
                continue
            forms, seconds = list[ChunkForm](), block.forward_seconds
            for level in levels:
                slower = max(0.0, level.plan.seconds / level.plan.whole_seconds - 1)
                form = ChunkForm(
                    budget_bytes=level.budget_bytes,
                    saved_bytes=max(0, block.saved_bytes + level.n_bytes.saved_bytes - plain.saved_bytes),
                    keeps=tuple(sorted({*block.keeps, *block.inputs})),
                    extra_seconds=slower * PASSES * seconds,
                )
                forms.append(form)
            moments += _moments(self._plain, i, levels, plain, of=KEPT, first=CHUNKED)
            if block.fqn in self._plain.names:
                # the same forms, with recomputation
                forms += [
                    replace(f, saved_bytes=0, keeps=block.inputs, extra_seconds=f.extra_seconds + seconds, again=True)
                    for f in forms
                ]
                moments += _moments(self._plain, i, levels, plain, of=RECOMPUTED, first=CHUNKED + len(levels))
            blocks.append(replace(block, chunks=tuple(forms)))
        return replace(self._plain, blocks=tuple(blocks), moments=tuple(moments))

    def form(self, fqn: str, form: int) -> ChunkForm:
        """Return one of a block's forms by its number."""
        return next(block.chunks[form - CHUNKED] for block in self.chain.blocks if block.fqn == fqn)

    @property
    def reason(self) -> str:
        """Why no block has a chunked form; "" if one has."""
        if any(block.chunks for block in self.chain.blocks):
            return ""
        if not self._plain.blocks:
            return "the step calls no child of a list or a sequence of modules; blocks= names others"
        found = zip(self._plain.blocks, self._found[0], strict=True)
        return group_reasons((block.fqn, _in_the_way(table)) for block, table in found)

    def choose(self, budget_bytes: int | None, *, recompute: bool) -> FormChoice:
        """Return the fastest choice within a budget; if none fits, or without a budget, the choice of least bytes.

        If the budget requires no form, or is None, the choice of least bytes excludes forms that are much slower than
        the block.
        """
        found = None
        if budget_bytes is not None:
            found = choose(self.chain, max(0, budget_bytes), recompute=recompute, chunk=True)
        if found is not None and found.forms:
            return found
        key = recompute, budget_bytes is None or found is not None
        if key not in self._leanest:
            chain, moments = self.chain, list[ChainMoment]()
            for moment in chain.moments if key[1] else ():
                # forms that are much slower than the block are made too large to be chosen
                block = None if moment.block is None else chain.blocks[moment.block]
                slow = block and block.extra_seconds(moment.form) > (SLOWEST - 1) * PASSES * block.forward_seconds
                moments.append(replace(moment, n_bytes=NEVER) if slow else moment)
            chain = replace(chain, moments=tuple(moments)) if key[1] else chain
            self._leanest[key] = leanest(chain, recompute=recompute, chunk=True)
        return self._leanest[key]

    @property
    def failed(self) -> Iterator[str]:
        """Notes on the blocks whose search has failed."""
        found = zip(self._plain.blocks, self._found[0], strict=True)
        known = dict.fromkeys((b.fqn, why) for b, why in found if isinstance(why, str) and UNEXPECTED in why)
        yield from (f"{fqn!r} does not run in chunks: {why}" for fqn, why in known)

    @property
    def thinned(self) -> tuple[str, ...]:
        """Blocks with too many regions to compare, whose forms use only some of them."""
        found = self._found[1]
        many = {key for key, (levels, _) in found.items() if any(level.plan.thinned for level in levels)} | self._cut
        calls = zip(self._plain.blocks, self._found[0], strict=True)
        return tuple(dict.fromkeys(block.fqn for block, table in calls if id(table) in many))

    @cached_property
    def _found(self) -> tuple[list[Table | str], dict[int, tuple[list[_Level], BlockBytes]]]:
        """Tables by call, and the plans of each table."""
        tables = list(self.tables())
        by_name: dict[str, Table | str] = {}
        for block, table in zip(self._plain.blocks, tables, strict=True):
            first = by_name.setdefault(block.fqn, table)
            if first is not table:
                # a rule has one budget, but calls of a block with different signatures would require several
                by_name[block.fqn] = "it is called in several ways in one step"
        tables = [by_name[block.fqn] for block in self._plain.blocks]
        known: dict[int, tuple[list[_Level], BlockBytes]] = {}
        # kept alive: known by their ids
        failed: dict[int, tuple[Table, str]] = {}
        distinct = {id(table): table for table in tables if isinstance(table, Table)}
        n_rows = sum(len(table.rows) for table in distinct.values())
        for key, table in distinct.items():
            levels = _Levels(table, self.costs, WORK * len(table.rows) // n_rows)
            plans = result_or_reason(_sorted_plans, levels)
            if isinstance(plans, str):
                failed[key] = table, plans
                continue
            known[key] = plans, block_bytes(table.rows, table.outputs)
            self._cut |= {key} if levels.cut else set()
        return [failed[id(table)][1] if id(table) in failed else table for table in tables], known


def _sorted_plans(levels: "_Levels") -> list[_Level]:
    return sorted(levels.found(), key=lambda level: level.budget_bytes)


class _Levels:
    """Plans of a table for several budgets, within a number of steps of the search.

    Attributes:
        cut: Whether the steps ended the search before it had a plan for every budget.
    """

    def __init__(self, table: Table, costs: CostModel, steps: int) -> None:
        self._table, self._costs, self._steps, self.cut = table, costs, steps, False

    def found(self) -> Iterator[_Level]:
        """Yield the distinct plans, by `ORDER`; where steps are few, the last budgets have none."""
        table, costs = self._table, self._costs
        whole = block_bytes(table.rows, table.outputs).peak_bytes
        try:
            choose_chunks(table, 1, train=True, costs=costs)
            return
        except OverBudget as error:
            least, used = round(SPARE * error.least_bytes), error.least.steps if error.least else 0
        known = list[object]()
        for k in ORDER if least <= WORTH * whole else ():
            if used > self._steps and known:
                self.cut = True
                return
            # rounded, so that the installed block is planned for the same budget, and the cached plan is used
            budget = rung(round(least * (whole / least) ** (k / LEVELS)))
            plan = choose_chunks(table, budget, train=True, costs=costs)
            used += plan.steps
            # a smaller budget that gives the same plan is not needed, nor is a larger one
            if plan.regions not in known and plan.peak_bytes <= WORTH * whole:
                known.append(plan.regions)
                yield _Level(budget_bytes=budget, plan=plan, n_bytes=chunk_bytes(table, plan.regions, train=True))


def _moments(
    chain: Chain, i: int, levels: Sequence[_Level], plain: BlockBytes, *, of: int, first: int
) -> Iterator[ChainMoment]:
    """Yield the peak moment of a block in each of its forms: that of form `of`, minus what the chunks save."""
    own = [moment for moment in chain.moments if moment.block == i and moment.form == of]
    if not own:
        return
    # the moment with the most bytes in total, including other live tensors, is the one that chunks must lower
    fullest = max(own, key=lambda m: m.n_bytes + sum(chain.tensors[k] for k in m.alive))
    for n, level in enumerate(levels):
        less = plain.peak_bytes - level.n_bytes.peak_bytes
        yield replace(fullest, n_bytes=max(0, fullest.n_bytes - less), form=first + n)


def _in_the_way(table: Table | str) -> str:
    """Return why there is no table, or why the dims of a block with a table cannot be cut."""
    if isinstance(table, str):
        return table
    if table.unknown:
        why = f"it has no rule for {', '.join(table.unknown[:3])}"
    elif any(row.random for row in table.rows):
        why = "what draws random numbers, such as dropout, is computed whole"
    else:
        why = "its largest tensors are its arguments and results, or one that needs all of another"
    return f"no part takes less in chunks: {why}"
