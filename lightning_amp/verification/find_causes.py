"""Which part of a model breaks equivalence: what brings the errors back when all else is put right.

First everything that can be put right is; where the errors vanish, each thing is left as it was again, one at a time.
So two causes are found as well as one, and nothing is named that does not matter.

    put right                           how
    random draws                        each cell draws from its own seed (keyed_draws.py), place by place
    batch statistics                    share_batch_statistics=True
    unequal parts                       the batch is cut so that all ranks have equally many samples
    mean of means                       every rank gets the same cells

A sum over samples is detected by its gradients: all are the ranks' times the number of data ranks.
"""

from collections.abc import Iterator
from dataclasses import replace

from lightning_amp.errors import AmpError
from lightning_amp.verification import cause_texts
from lightning_amp.verification.experiments import Experiments, Findings
from lightning_amp.verification.result import Culprit
from lightning_amp.verification.training_run import Treatment

MOST_SITES = 12
"""Places of draws that are probed one by one; more are probed together."""
SAME_DIRECTION = 1e-6


def find_culprits(experiments: Experiments, findings: list[Findings]) -> tuple[Culprit, ...]:
    """What makes the ranks differ."""
    first = next(found for found in findings if not found.ok)
    if any(row.error != row.error for row in first.rows):
        return (cause_texts.not_finite(first),)
    steps = 1
    plain = experiments.experiment(Treatment(), steps=steps)
    if plain.ok:
        steps = experiments.run.steps
        plain = experiments.experiment(Treatment(), steps=steps)
    if plain.ok:
        return (cause_texts.rounding(first, plain),)
    found = tuple(_Search(experiments, plain, steps).culprits())
    return found or (cause_texts.unknown(plain, plain),)


class _Search:
    """One search; `plain` is the run with nothing put right."""

    def __init__(self, experiments: Experiments, plain: Findings, steps: int) -> None:
        self._experiments, self._plain, self._steps = experiments, plain, steps
        self._parts = plain.first.place[1]

    def culprits(self) -> Iterator[Culprit]:
        """Put right draws and statistics, then the cells; then leave as they were what might not matter."""
        treatment = Treatment(native=frozenset())
        best = self._try(treatment)
        if not self._experiments.run.options.get("share_batch_statistics", True) and self._plain.first.norms:
            treatment, best = self._with_statistics(treatment, best)
        if not best.ok:
            treatment, best, found = self._explain_rest(treatment, best)
            yield from found
        if best.ok:
            yield from self._draws(treatment, best)
        if best.ok and treatment.share:
            yield from self._statistics(treatment, best)

    def _try(self, treatment: Treatment) -> Findings:
        return self._experiments.experiment(treatment, steps=self._steps)

    def _with_statistics(self, treatment: Treatment, best: Findings) -> tuple[Treatment, Findings]:
        shared = replace(treatment, share=True)
        try:
            return shared, self._try(shared)
        except AmpError:
            # a layer whose statistics cannot be shared stays as it is
            return treatment, best

    def _explain_rest(
        self, treatment: Treatment, best: Findings
    ) -> tuple[Treatment, Findings, list[Culprit]]:
        """What errors are of that are left though draws and statistics are equal."""
        wrong = [row for row in best.rows if row.wrong]
        if all(row.quantity.startswith("buffers") for row in wrong):
            return treatment, best, [cause_texts.buffers([name for row in wrong for name in row.wrong], best)]
        factor = _factor(best)
        if self._parts > 1 and factor is not None and abs(factor / self._parts - 1) < SAME_DIRECTION:
            return treatment, best, [cause_texts.summed(factor)]
        possible = {"equal": self._plain.first.uneven, "same": self._parts > 1}
        for cells in ("equal", "same"):
            if possible[cells]:
                cut = replace(treatment, cells=cells)
                after = self._try(cut)
                if after.ok:
                    equal = cells == "equal"
                    return (
                        cut,
                        after,
                        [cause_texts.unequal(best, after)] if equal else cause_texts.own_cells(best, after),
                    )
        return treatment, best, [cause_texts.unknown(self._plain, best)]

    def _draws(self, treatment: Treatment, best: Findings) -> Iterator[Culprit]:
        sites = self._plain.first.sites
        for group in [[site] for site in sites] if len(sites) <= MOST_SITES else [sites]:
            left = self._try(replace(treatment, native=frozenset(group)))
            if not left.ok:
                yield cause_texts.drawn(group, left, best)

    def _statistics(self, treatment: Treatment, best: Findings) -> Iterator[Culprit]:
        # the same cells on every rank have the same statistics, so what the layers make of the given ones tells
        own = self._try(replace(treatment, share=False, cells="as given"))
        norms = [name for name in own.origins if name in own.first.norms]
        if norms:
            yield cause_texts.normalised(norms, own, best)


def _factor(found: Findings) -> float | None:
    """By what all gradients of one process are those of the ranks, where it is one number."""
    mixed, own, one = found.first.products
    if not own or not one or mixed != mixed:
        return None
    return mixed / own if abs(1 - mixed * mixed / (own * one)) < SAME_DIRECTION else None
