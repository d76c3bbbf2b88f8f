"""Define sizes of attention, the same for the reference and its replacements."""

from torch import Tensor

from lightning_amp.errors import ModelError


def check_sizes(name: str, dim: object, window: object) -> None:
    """Refuse what is no size of attention.

    Raises:
        ModelError: A number that is not whole, or too small, or an odd dim.
    """
    if not _whole(dim, least=2) or dim % 2:  # type: ignore[operator]
        raise ModelError(f"{name}(dim={dim!r}): rotary needs an even dim, a whole number; choose 2, 4, ...")
    if not _whole(window, least=1):
        raise ModelError(
            f"{name}(window={window!r}): a bucket needs at least one anchor, a whole number; choose window >= 1"
        )


def check_rows(q: Tensor, k: Tensor, values: Tensor) -> None:
    """Refuse queries, keys and values of different anchors.

    Raises:
        ModelError: Not as many keys and values as queries.
    """
    if not len(q) == len(k) == len(values):
        raise ModelError(
            f"attention was called with {len(q)!r} queries, {len(k)!r} keys and {len(values)!r} "
            "values; allowed is one of each for every anchor: pass equally many"
        )


def _whole(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
