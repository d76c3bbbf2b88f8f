"""Durations as people read them: "1.73 s", "870 ms", "12.0 us"."""

_UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))


def format_seconds(seconds: float) -> str:
    """Write a duration with three digits, at most eight characters wide; from two minutes on in minutes or hours."""
    unit, size = next(
        ((u, n) for u, n in _UNITS if seconds >= (2 * n if n > 1 else 0.9995 * n)), ("us", 1e-6)
    )
    value = seconds / size
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
