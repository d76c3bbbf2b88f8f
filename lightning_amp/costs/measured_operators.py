"""Seconds of operators as measured on a device, by name and by the seconds that its rates predict."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, log
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.quantities import is_number

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredOperators:
    """Operators of a training step, measured at several sizes.

    An operator of another size takes its prediction times the measured ratio, which is interpolated between the
    nearest two sizes by the logarithm of the prediction. Beyond the measured sizes, the ratio is that of the last one.

    Attributes:
        step: The step whose operators they are, in words.
        points: For every operator, by its name in torch, predicted and measured seconds, in ascending order.
    """

    step: str
    points: Mapping[str, Points] = field(hash=False)

    def __post_init__(self) -> None:
        """Validate the numbers.

        Raises:
            PlanError: A number is out of range, or the predictions of an operator do not increase.
        """
        for name, points in self.points.items():
            predicted = [point[0] for point in points]
            numbers = (n for point in points for n in point)
            if not points or not all(is_number(n) and 0 < n < inf for n in numbers) or predicted != sorted(predicted):
                raise PlanError(
                    f"operator {name!r} has the seconds {points!r}; allowed are ascending pairs: calibrate again"
                )

    @classmethod
    def of_json(cls, plain: Any) -> "MeasuredOperators":
        """Read the plain values that `dataclasses.asdict` has made."""
        points = {str(name): tuple((at, took) for at, took in found) for name, found in plain["points"].items()}
        return cls(step=plain["step"], points=points)

    def seconds(self, name: str, predicted: float) -> float:
        """Return the seconds of an operator whose rates predict `predicted` seconds; these if it was not measured."""
        points = self.points.get(name)
        if points is None or predicted <= 0.0:
            return predicted
        above = bisect_left(points, (predicted, 0.0))
        (low, took_low), (high, took_high) = points[max(0, above - 1)], points[min(above, len(points) - 1)]
        share = 0.0 if high == low else min(1.0, max(0.0, log(predicted / low) / log(high / low)))
        return predicted * ((1.0 - share) * took_low / low + share * took_high / high)
