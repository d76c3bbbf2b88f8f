"""The strategy library of AMP by number: what each does and what it shrinks (Zhang et al. 2026, Table 4)."""

from dataclasses import dataclass

from lightning_amp.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyInfo:
    """One strategy: its title, what it shrinks, and whether it needs the model axis of the mesh."""

    title: str
    shrinks: str
    model_axis: bool = False


STRATEGIES: dict[str, StrategyInfo] = {
    "S1": StrategyInfo(title="data parallel", shrinks="cells per rank"),
    "S2": StrategyInfo(title="feature parallel", shrinks="[B, F] to [B, F / R]", model_axis=True),
    "S3": StrategyInfo(title="chunked attention", shrinks="[N, 3 w] to [C, 3 w]"),
    "S4": StrategyInfo(title="key-first decode", shrinks="[B, N] to [B, F_k]"),
    "S5": StrategyInfo(title="hidden-dimension parallel", shrinks="[N, D] to [N, D / R]", model_axis=True),
}


def parse_strategies(asked: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Read a list of strategy ids, given as a list or as "S1,S3"; sorted, each once, S1 always included.

    Raises:
        PlanError: An id that is not in the library.
    """
    if not isinstance(asked, str | list | tuple):
        raise PlanError(
            f"strategies={asked!r} was asked for; allowed is a list such as ['S1', 'S3'], or 'S1,S3'"
        )
    parts = asked.split(",") if isinstance(asked, str) else list(asked)
    ids = [str(part).strip().upper() for part in parts if str(part).strip()]
    unknown = [i for i in ids if i not in STRATEGIES]
    if unknown or not ids:
        raise PlanError(
            f"strategies={asked!r} was asked for, {unknown or 'nothing'!r} is not in the library; allowed are"
            f" {', '.join(STRATEGIES)}, as a list or separated by commas"
        )
    return tuple(sorted({"S1", *ids}))
