"""Rates of the link between the memory of a device and that of its host, and of the host's operators."""

from dataclasses import asdict, dataclass
from math import inf

from lightning_amp.errors import PlanError
from lightning_amp.quantities import is_number

ONE_CORE = 11.5e9
"""Bytes per second that operators of one core of a server read and write (device_rates.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLink:
    """Bytes per second between a device and host memory.

    Attributes:
        out, back: From and to the device, of pinned memory, one direction alone.
        both: Of each direction while both run, of pinned memory.
        pageable_out, pageable_back: From and to the device, of memory that is not pinned.
        memory: Bytes that a rank's share of the host's cores reads and writes in elementwise operators.
    """

    out: float
    back: float
    both: float
    pageable_out: float
    pageable_back: float
    memory: float = ONE_CORE

    def __post_init__(self) -> None:
        """Validate the numbers.

        Raises:
            PlanError: A number is out of range.
        """
        if not all(is_number(n) and 0 < n < inf for n in asdict(self).values()):
            raise PlanError(f"{self!r} is invalid; rates are above 0: calibrate again")

    @classmethod
    def alike(cls, rate: float, memory: float = ONE_CORE) -> "HostLink":
        """Return a link with one rate, as a data sheet has it."""
        return cls(out=rate, back=rate, both=rate, pageable_out=rate, pageable_back=rate, memory=memory)
