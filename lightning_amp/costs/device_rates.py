"""Define device rates for the cost model: rates of products and of memory, and the links between devices.

Figures of GPUs are those of the vendor's data sheets (NVIDIA GeForce RTX 3090; A100, H100 and H200 in the SXM form):
products (dense) in float32, TF32, bfloat16 and float16, memory bandwidth, and NVLink in one direction, of the RTX 3090
PCI Express 4.0 x16. To the host PCI Express x16 in one direction, 4.0 or (H100 and H200) 5.0. Between nodes one
200 Gb/s adapter per device (RTX 3090 and A100) or one of 400 Gb/s. Sheets say nothing of attention, by products or in
fused kernels, of an operator's overhead and of a message's latency; these are round estimates.
The figures of "cpu core" are fitted to the measured steps of tests/project/time_grid.jsonl, one thread of a server:
140 GFLOP/s in float32 products, 11.5 GB/s through operators, 8 microseconds per operator with the Python around it; a
message by gloo between two of its processes takes 0.3 ms and 1 GB/s.

No device reaches its data sheet. Order and ratios are what a plan needs; `calibrated` fits the rates to one measured
step, and `to_json` keeps them. A device that is not known gets the rates of the known one whose memory is nearest to
its own, and `nearest_rates` says so.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from math import inf, log
from pathlib import Path
from typing import Any

from lightning_amp.costs.link_seconds import Links
from lightning_amp.errors import PlanError
from lightning_amp.quantities import is_number

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one device reaches.

    Attributes:
        matmul_flops: Operations of matrix products per second.
        memory_bytes: Bytes per second that elementwise operators read and write.
        attention_share: Of matmul_flops, what the products of attention reach.
        device: Whose rates they are, in words.
        launches: Whether operators are launched on it by a processor that goes on, as on a GPU.
        sdpa_share: Of matmul_flops, what attention in torch's fused kernels reaches.
        host_bandwidth: Bytes per second between the device and the host's memory, one way.
    """

    matmul_flops: float
    memory_bytes: float
    attention_share: float
    overhead_seconds: float
    links: Links
    device: str = "a device without a name"
    launches: bool = False
    sdpa_share: float = 0.5
    host_bandwidth: float = 31.5e9

    def __post_init__(self) -> None:
        """Refuse rates that cannot be.

        Raises:
            PlanError: A number is out of range.
        """
        shares = (self.attention_share, self.sdpa_share)
        rates = (self.matmul_flops, self.memory_bytes, self.host_bandwidth, *shares)
        if not all(is_number(n) and 0 < n < inf for n in rates) or not max(shares) <= 1:
            raise PlanError(
                f"{self!r} is invalid; rates are above 0, and shares of them are no more than 1: correct them"
            )
        if not (is_number(self.overhead_seconds) and 0 <= self.overhead_seconds < inf):
            raise PlanError(f"{self!r} is invalid; overhead_seconds is 0 or more: correct it")
        if not isinstance(self.device, str) or not self.device.strip():
            raise PlanError(f"{self!r} is invalid; device is whose rates they are, in words: correct it")

    def on_nodes_of(self, devices: int | None) -> "Rates":
        """The same rates where a node has so many devices; as they are where that is not known."""
        return self if devices is None else replace(self, links=replace(self.links, ranks_per_node=devices))

    def to_json(self) -> str:
        """The rates as indented JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the text") -> "Rates":
        """Read what `to_json` wrote.

        Raises:
            PlanError: Not JSON, another schema, fields that are missing or unknown, or numbers out of range.
        """
        try:
            plain: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"expected rates as JSON, {source} is not JSON: {error}") from error
        schema = plain.get("schema") if isinstance(plain, dict) else plain
        if schema != SCHEMA:
            raise PlanError(f"expected rates of schema {SCHEMA}, {source} has schema {schema!r}; calibrate again")
        plain.pop("schema")
        try:
            return cls(**{**plain, "links": Links(**plain["links"])})
        except (TypeError, KeyError) as error:
            names = sorted(f.name for f in fields(cls))
            raise PlanError(f"{source} does not read as rates: {error}; their fields are {names}") from error

    @classmethod
    def read(cls, path: str | Path) -> "Rates":
        """Read a file of rates.

        Raises:
            PlanError: The file cannot be read, or holds no rates.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                f"rates={str(path)!r} cannot be read: {error}; write them with `lightning-amp calibrate"
                " --out FILE.json`"
            ) from error
        return cls.from_json(text, source=str(path))


def products_under(precision: str) -> str:
    """What products are computed in under a Trainer's precision, as `rates_for` names it."""
    return "half" if precision.startswith(("bf16", "16")) else "float32"


def rates_for(device_name: str, *, products: str = "float32") -> Rates:
    """The rates of a device whose name contains that of a known one, such as "NVIDIA A100-SXM4-40GB".

    Args:
        device_name: As torch names it, or "cpu".
        products: "float32", "tf32" where torch is set to it, or "half" for bfloat16 and float16.

    Raises:
        PlanError: No known device.
    """
    found = _known(device_name)
    if found is None:
        raise PlanError(
            f"rates of {device_name!r} are not known; supported are names that contain one of"
            f" {', '.join(DEVICES)}: choose the one most like it and calibrate"
        )
    rates = DEVICES[found]
    flops = PRODUCTS.get(products, {}).get(found)
    return rates if flops is None else replace(rates, matmul_flops=flops)


def nearest_rates(device_name: str, *, memory_bytes: int, products: str = "float32") -> tuple[Rates, str]:
    """The rates of a GPU, known or not, and a sentence that says whose they are where it is not; else "".

    Args:
        memory_bytes: Memory of the device.
        products: As for `rates_for`.
    """
    if _known(device_name):
        return rates_for(device_name, products=products), ""
    near = min(MEMORY_GIB, key=lambda name: abs(log(memory_bytes / 2**30 / MEMORY_GIB[name])))
    return rates_for(near, products=products), (
        f"the rates of {device_name!r} are not known: times are predicted for {DEVICES[near].device}, whose memory is"
        " nearest; `lightning-amp calibrate` measures them"
    )


def _known(device_name: str) -> str | None:
    return next((name for name in DEVICES if name.lower() in device_name.lower()), None)


def calibrated(rates: Rates, predicted_seconds: float, measured_seconds: float) -> Rates:
    """Rates under which the prediction for one device is what was measured.

    All parts of a device's own time are scaled by one factor; the links are left as they are, and so is whose rates
    they are.

    Args:
        rates: With which the prediction was made.
        predicted_seconds: Of a step on one device, by which nothing is sent.
        measured_seconds: Of the same step.
    """
    faster = predicted_seconds / measured_seconds
    return replace(
        rates,
        matmul_flops=rates.matmul_flops * faster,
        memory_bytes=rates.memory_bytes * faster,
        overhead_seconds=rates.overhead_seconds / faster,
    )


def _gpu(device: str, *, teraflops: float, memory: float, link: float, network: float, host: float = 31.5) -> Rates:
    """A GPU of a data sheet; bandwidths in gigabytes per second, one way."""
    links = Links(
        intra_bandwidth=link * 1e9, inter_bandwidth=8 * network * 1e9, latency=1e-5, ranks_per_node=8, adapters=8
    )
    return Rates(
        matmul_flops=teraflops * 1e12,
        memory_bytes=memory * 1e9,
        attention_share=0.7,
        overhead_seconds=5e-6,
        links=links,
        device=device,
        launches=True,
        host_bandwidth=host * 1e9,
    )


CPU_CORE = Rates(
    matmul_flops=140e9,
    memory_bytes=11.5e9,
    attention_share=1.0,
    overhead_seconds=8e-6,
    links=Links(intra_bandwidth=1e9, inter_bandwidth=1e9, latency=3e-4, ranks_per_node=64),
    device="one CPU core",
    sdpa_share=1.0,
)
DEVICES = {
    "cpu": CPU_CORE,
    "RTX 3090": _gpu("an RTX 3090", teraflops=35.6, memory=936, link=31.5, network=25),
    "A100": _gpu("an A100", teraflops=19.5, memory=1555, link=300, network=25),
    "H100": _gpu("an H100", teraflops=67, memory=3350, link=450, network=50, host=63),
    "H200": _gpu("an H200", teraflops=67, memory=4800, link=450, network=50, host=63),
}
"""By a part of the device's name."""
MEMORY_GIB = {"RTX 3090": 24, "A100": 40, "H100": 80, "H200": 141}
PRODUCTS = {
    "tf32": {"A100": 156e12, "H100": 494e12, "H200": 494e12},
    "half": {"RTX 3090": 71e12, "A100": 312e12, "H100": 989e12, "H200": 989e12},
}
"""Operations per second of dense products that are not float32's; TF32 of the RTX 3090 is what float32 reaches."""
