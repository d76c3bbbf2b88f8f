"""Define `DeviceBytes`: what a process is predicted to take of a GPU, and what it may take."""

from dataclasses import dataclass

from lightning_amp.quantities import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBytes:
    """What a process takes of a GPU, per rank.

    Attributes:
        reserved_bytes: Most bytes that torch's allocator reserves for the largest phase, with cuBLAS's workspaces.
        context_bytes: CUDA's context.
        nccl_bytes: NCCL's buffers; 0 for one rank.
        measured: Which of these two were measured; the others are defaults.
        budget_bytes: What the process may take of the device.
        estimated: Why what is reserved was not replayed but estimated from the tensors; "" if it was replayed.
        given_back: How often the allocator has to give free segments back because the device is full, which takes time.
    """

    reserved_bytes: int
    context_bytes: int
    nccl_bytes: int
    measured: tuple[str, ...]
    budget_bytes: int
    estimated: str = ""
    given_back: int = 0

    @property
    def needed_bytes(self) -> int:
        """All that the process takes."""
        return self.reserved_bytes + self.context_bytes + self.nccl_bytes

    @property
    def fits(self) -> bool:
        """Whether that is within the budget."""
        return self.needed_bytes <= self.budget_bytes

    def in_words(self) -> str:
        """Format what the process takes: "5.20 GiB reserved + 749 MiB context = 5.93 GiB of 23.6 GiB"."""
        about = "about " if self.estimated else ""
        nccl = f" + {format_bytes(self.nccl_bytes)} NCCL" if self.nccl_bytes else ""
        return (
            f"{about}{format_bytes(self.reserved_bytes)} reserved + {format_bytes(self.context_bytes)} context{nccl} ="
            f" {format_bytes(self.needed_bytes)} of {format_bytes(self.budget_bytes)}"
        )
