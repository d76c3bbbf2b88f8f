"""Read the settings of torch's CUDA allocator that decide what it reserves, as text of its environment variable."""

from dataclasses import dataclass

from lightning_amp.errors import PlanError

SMALLEST, MIB = 512, 2**20
WITHOUT_EFFECT = (
    *("garbage_collection_threshold", "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse"),
    *("pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads"),
    "pinned_reserve_segment_size_mb",
)
"""Settings that do not change where a block is placed; collection of garbage only lowers what is reserved."""


def rounded(n_bytes: int, unit: int = SMALLEST) -> int:
    """Return the least multiple of `unit` that is at least `n_bytes`, and at least `unit`."""
    return max(unit, -(-n_bytes // unit) * unit)


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings of the allocator. AMPStrategy lets segments grow, unless the environment has settings.

    Attributes:
        expandable: Whether segments grow (`expandable_segments`).
        max_split_bytes: Free blocks of this size and more are not split (`max_split_size_mb`); None for no limit.
        divisions: Parts of the range between two powers of two, to whose ends sizes are rounded up
            (`roundup_power2_divisions`); 1 rounds to 512 bytes only.
    """

    expandable: bool = True
    max_split_bytes: int | None = None
    divisions: int = 1

    @classmethod
    def parse(cls, text: str) -> "AllocatorSettings":
        """Read a text such as "expandable_segments:True,max_split_size_mb:128"; "" has torch's defaults.

        Raises:
            PlanError: A setting is not modelled, such as another backend.
        """
        expandable, most, divisions = False, None, 1
        for name, value in (part.strip().partition(":")[::2] for part in text.split(",") if part.strip()):
            if name == "expandable_segments" and value in ("True", "False"):
                expandable = value == "True"
            elif name == "max_split_size_mb" and value.isdecimal():
                most = int(value) * MIB
            elif name == "roundup_power2_divisions" and value.isdecimal() and int(value).bit_count() == 1:
                divisions = int(value)
            elif name not in WITHOUT_EFFECT and (name, value) != ("backend", "native"):
                raise PlanError(
                    f"the setting {name + ':' + value!r} of CUDA's allocator is not modelled; modelled are"
                    " expandable_segments, max_split_size_mb and roundup_power2_divisions with one power of two"
                )
        return cls(expandable, most, divisions)

    def size_of(self, n_bytes: int) -> int:
        """Return the size of the block for a tensor."""
        floor = 1 << max(0, n_bytes.bit_length() - 1)
        if self.divisions > 1 and n_bytes > SMALLEST * self.divisions and floor != n_bytes:
            return rounded(n_bytes, floor // self.divisions)
        return rounded(n_bytes)
