"""The questions of `lightning-amp plan --what-if`, as text: "strata=10,32 batch=1,64 memory=24GiB,80GiB".

bin        bin sizes, such as 500kb; of a data directory (1mb, 500kb, 100kb, 50kb)
anchors    N, instead of bin; of a decoder by itself (a half, one, five and ten times its own)
strata     K (10, 32)
batch      cells of a step (1, 64, 256)
memory     of one device (8GiB, 24GiB, 80GiB)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_amp.costs.model_shape import LARGEST
from lightning_amp.data.files.resolution import parse_resolution
from lightning_amp.errors import DataError, PlanError
from lightning_amp.profiling.profile import DecompositionProfile
from lightning_amp.quantities import parse_bytes

BINS = (1_000_000, 500_000, 100_000, 50_000)
TIMES = (0.5, 1, 5, 10)
"""Of a decoder's own anchors: what the bin sizes above are of bins of 500 kb."""
STRATA = (10, 32)
BATCH_SIZES = (1, 64, 256)
MEMORIES = (8 * 2**30, 24 * 2**30, 80 * 2**30)
MOST_STRATA = 10_000
EXAMPLE = "strata=10,32 batch=64 memory=24GiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """All values to combine.

    Attributes:
        bins: Bin sizes in base pairs, None where anchors are asked for or nothing is.
        anchors: N, None where bin sizes are asked for or nothing is.
        budgets: Bytes of one device, ascending.
        strata_named: Whether a person named the strata, and they are not the usual ones.
    """

    bins: tuple[int, ...] | None = None
    anchors: tuple[int, ...] | None = None
    strata: tuple[int, ...] = STRATA
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    budgets: tuple[int, ...] = MEMORIES
    strata_named: bool = False

    def sizes_of(self, parts: DecompositionProfile) -> tuple[tuple[int | None, int], ...]:
        """Bin size and anchors of every size; without either asked for, the defaults.

        Args:
            parts: The strata of the data or the decoder that is asked about.

        Raises:
            PlanError: Bin sizes were asked for, and that of the data is not known, or there would be more anchors
                than can be.
        """
        if self.anchors is not None:
            return tuple((None, n) for n in self.anchors)
        if parts.bin_bases is None and self.bins is not None:
            raise PlanError(
                f"bin={','.join(map(str, self.bins))} was asked for, and the bin size of what is asked about is not"
                f" known; give anchors instead, which are {parts.anchors:,} now"
            )
        if parts.bin_bases is None:
            every = (max(1, round(parts.anchors * t)) for t in TIMES)
            return tuple((None, n) for n in every if n <= LARGEST)
        sizes = [(b, max(1, round(parts.anchors * parts.bin_bases / b))) for b in self.bins or BINS]
        if max(n for _, n in sizes) > LARGEST:
            raise PlanError(
                f"{max(n for _, n in sizes):,} anchors would be asked for; {LARGEST:,} is the most: choose larger bins"
            )
        return tuple(sizes)


def parse_questions(words: Sequence[str]) -> Questions:
    """Read what is asked.

    Args:
        words: Each a name, an equals sign and values separated by commas.

    Raises:
        PlanError: Not such words, a name or value that is not allowed, or both bins and anchors.
    """
    found: dict[str, tuple[int, ...]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in READERS or READERS[name][0] in found:
            raise PlanError(
                f"--what-if {word!r} is not supported; allowed is each of {', '.join(READERS)} once, with values"
                f" separated by commas: write for example {EXAMPLE!r}"
            )
        field, read = READERS[name]
        # one after the other, ascending where they are compared
        values = dict.fromkeys(read(name, value) for value in text.split(","))
        found[field] = tuple(sorted(values) if name == "memory" else values)
    if "bins" in found and "anchors" in found:
        raise PlanError("--what-if was asked for with both bin and anchors; give one of them")
    return Questions(**found, strata_named="strata" in found)


def _whole(name: str, text: str) -> int:
    largest = MOST_STRATA if name == "strata" else LARGEST
    value = text.strip()
    if not value.isdecimal() or len(value) > 9 or not 1 <= int(value) <= largest:
        raise PlanError(
            f"--what-if {name}={text!r} is not supported; allowed are whole numbers from 1 to {largest:,}, separated"
            " by commas"
        )
    return int(value)


def _bases(name: str, text: str) -> int:
    try:
        return parse_resolution(text)
    except DataError as error:
        raise PlanError(f"--what-if {name}={text!r} was asked for: {error}") from error


def _bytes(name: str, text: str) -> int:
    return parse_bytes(text)


READERS: dict[str, tuple[str, Callable[[str, str], int]]] = {
    "bin": ("bins", _bases),
    "anchors": ("anchors", _whole),
    "strata": ("strata", _whole),
    "batch": ("batch_sizes", _whole),
    "memory": ("budgets", _bytes),
}
