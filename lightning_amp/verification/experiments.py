"""Training runs and what they say: every quantity of the ranks beside that of one process.

loss of a step = sum over data ranks of (cells of the rank / cells of all) loss of the rank
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_amp.verification.result import Row
from lightning_amp.verification.tolerances import Precision, allowed, loss_errors, swamped
from lightning_amp.verification.training_run import Report, Run, Treatment, run_nudged, run_one, run_rank
from lightning_amp.verification.workers import Workers

Nudged = Mapping[str, Mapping[str, float]]
"""Kind of quantity -> errors after one rounding in every weight."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What the ranks of one run have reported, beside the nudged run of the single process in the same precision."""

    precision: Precision
    reports: list[Report]
    nudged: Nudged

    @property
    def first(self) -> Report:
        """Rank 0's report."""
        return self.reports[0]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every quantity that there is something of, in the order in which a step makes them."""
        steps = len(self.first.one_losses)
        after = f"after {steps} step{'s' if steps > 1 else ''}"
        losses = self._losses()
        first = {name: error for name, error in losses.items() if name.split(",")[0] == "step 1"}
        later = {name: error for name, error in losses.items() if name not in first}
        found = (
            self._row("forward, step 1", "forward", self._worst("forward")),
            self._row("loss, step 1", "first loss", first),
            self._row("gradients, step 1", "gradients", self._worst("gradients")),
            self._row("loss, later steps", "later losses", later),
            self._row(f"parameters {after}", "parameters", self._worst("parameters")),
            self._row(f"buffers {after}", "buffers", self._worst("buffers")),
        )
        return tuple(row for row in found if row.errors)

    @property
    def ok(self) -> bool:
        """Whether no quantity is known to differ by more than rounding."""
        return not any(row.wrong for row in self.rows)

    @property
    def largest(self) -> float:
        """The largest error of a loss or a gradient, which rounding does not grow in."""
        rows = (row for row in self.rows if row.quantity.startswith(("loss", "gradients")))
        return max((row.error for row in rows), default=0.0)

    @property
    def origins(self) -> list[str]:
        """Modules that differ on a rank though what they read agrees."""
        return next((report.origins for report in self.reports if report.origins), [])

    def _row(self, quantity: str, kind: str, errors: Mapping[str, float]) -> Row:
        nudged = self.nudged.get("losses" if "loss" in kind else kind, {})
        known = {name: nudged.get(name, 0.0) for name in errors}
        return Row(
            quantity=quantity,
            precision=self.precision,
            errors=errors,
            tolerances=allowed(kind, self.precision, known),
            swamped=swamped(self.precision, known),
        )

    def _worst(self, kind: str) -> dict[str, float]:
        """The error of every tensor on the rank where it is largest."""
        worst: dict[str, float] = {}
        for report in self.reports:
            for name, error in report.errors[kind].items():
                known = worst.get(name)
                worst[name] = error if known is None or not error <= known else known
        return worst

    def _losses(self) -> dict[str, float]:
        one = self.first.one_losses
        union = [[self._union(step, i) for i, _ in enumerate(losses)] for step, losses in enumerate(one)]
        return loss_errors(union, one)

    def _union(self, step: int, backward: int) -> float:
        """The loss over the cells of all data ranks."""
        ranks = {report.place[0]: report for report in reversed(self.reports)}.values()
        cells = [report.cells[step] for report in ranks]
        if any(len(report.losses[step]) <= backward for report in ranks):
            return float("nan")
        known = [n for n in cells if n is not None]
        weights = known if len(known) == len(cells) and any(known) else [1] * len(cells)
        losses = [report.losses[step][backward] for report in ranks]
        return sum(n * loss for n, loss in zip(weights, losses, strict=True)) / sum(weights)


class Experiments:
    """Runs that differ from `run` in what is put right, by workers that have the subject in their folder."""

    def __init__(self, workers: Workers, run: Run) -> None:
        self._workers, self.run = workers, run
        self._nudged: dict[Precision, Nudged] = {}

    def run_one(self, **changes: Any) -> None:
        """Let the single process record a run, and find out what a rounding becomes, once for each precision."""
        run = replace(self.run, **changes)
        self._workers.single(run_one, run)
        if run.precision not in self._nudged:
            self._nudged[run.precision] = self._workers.single(run_nudged, run)

    def run_ranks(self, **changes: Any) -> Findings:
        """Let the ranks run the same, and compare."""
        run = replace(self.run, **changes)
        reports: list[Report] = self._workers.ranks(run_rank, run)
        self.run = replace(self.run, data_ranks=reports[0].place[1])
        return Findings(run.precision, reports, self._nudged[run.precision])

    def experiment(self, treatment: Treatment, *, steps: int) -> Findings:
        """Both, in double precision."""
        changes = {"treatment": treatment, "steps": steps, "precision": "float64"}
        self.run_one(**changes)
        return self.run_ranks(**changes)
