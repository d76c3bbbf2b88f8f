"""Define device rates for the cost model: rates of matrix products and memory, and links between devices.

GPU rates are from NVIDIA's data sheets (GeForce RTX 3090 and 4090; A100, H100 and H200 in the SXM form; GH200 with 96
GB; a DGX B200's B200): dense products in float32, TF32, bfloat16 and float16, memory bandwidth, and NVLink in one
direction (GeForce: PCI Express 4.0 x16). The link to the host is PCI Express x16 in one direction, 4.0 or (H100, H200
and B200) 5.0; of a GH200 it is NVLink-C2C. The host's memory is that of a device's share of its node, by the sheets of
the processors: DGX A100 (two EPYC 7742, 8 channels of DDR4-3200), DGX H100 (two Xeon 8480C, DDR5-4800; also for H200),
DGX B200 (two Xeon 8570, DDR5-5600), Grace (LPDDR5X), Frontier (one EPYC 7A53), GeForce: two channels of DDR4-3200.
Between nodes there is one adapter per device, of 200 Gb/s (GeForce and A100) or 400 Gb/s. An MI250X is two devices in
torch, so its rates are those of one (AMD's data sheet, halved): products on matrix cores, and one Infinity Fabric link
to each neighbour; links and the four 200 Gb/s adapters of eight devices are those of a node of Frontier (OLCF's user
guide). The sheets do not give the rates of attention (by products or in fused kernels), the overhead of an operator or
the latency of a message; the first and the last are round estimates. An operator takes 15 microseconds beside what it
computes, with Python, autograd and the launch: of decoders on an H100 (docs/reports/gpu.md) steps that wait for the
processor take so long, and predicted steps are off by a factor of 1.12 in the mean (of 1.5 at 5 microseconds). "cpu" is
fitted to the measured steps of tests/project/time_grid.jsonl, one thread of a server: 140 GFLOP/s in float32 products,
11.5 GB/s through operators, 8 microseconds per operator including Python; a gloo message between two processes takes
0.3 ms, at 1 GB/s.

No device reaches its data sheet, but a plan needs only order and ratios; `calibrate` fits the rates to one measured
step, and `to_json` saves them. A device that is not in the table gets the rates of the one with the nearest memory
size, and `nearest_rates` says so.

A plan for a device by name has that device's memory as its budget: what CUDA reports (98.5 % of the data sheet's
GiB or more, of all four); what a process takes beside tensors is in device_memory.py. `calibrate` measures both.

Ring collectives depend on the bandwidth between the ranks. A group of G ranks has alpha seconds per message, and beta
bytes per second to the next rank of the ring:

    all-gather      (G - 1) n / beta + (G - 1) alpha             n = the bytes that each rank contributes
    reduce-scatter  (G - 1) / G n / beta + (G - 1) alpha         n = the bytes that each rank contributes
    all-reduce      2 (G - 1) / G n / beta + 2 (G - 1) alpha     n = the bytes that each rank contributes
    exchange        n / beta + alpha                             n = the bytes that each rank sends to its neighbours
    all-to-all      n / beta + alpha                             n = the bytes that each rank sends to all others

These are Eq. 1 to 3 of Singh et al. 2024 (AxoNN, arXiv 2305.13525), with the latency that their third assumption omits:
strata send many small messages. Bandwidth depends on the placement (their Eq. 10). Groups of an axis nest inside those
of the next. With I ranks in the axes nested inside this one, and P ranks per node:

    beta = beta_intra                                       if I G <= P: the group lies in a node
    beta = min(beta_intra, beta_inter / max(min(P, I), A))  otherwise

In the second case min(P, I) rings leave a node concurrently and share its A network adapters. A ring uses one adapter,
and is no faster than its slowest link, which may be inside a node.

A group of one rank sends nothing. If `calibrate --links` has measured a collective, alpha is the time to start one of
its rounds, and beta is multiplied by the measured share. Known limits: rings only, no overlap with computation, equal
links; libraries that spread a ring over several adapters are faster between nodes than predicted without a measurement.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf, isfinite, log
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_amp.costs.device_memory import DeviceMemory, memory_of_tensors
from lightning_amp.costs.host_link import ONE_CORE, HostLink
from lightning_amp.costs.measured_operators import MeasuredOperators
from lightning_amp.errors import PlanError, meant
from lightning_amp.quantities import is_number

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "exchange", "all_to_all"]
WITHIN, BETWEEN = "within a node", "between nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Links between devices.

    Attributes:
        intra_bandwidth: Bytes per second between two ranks of a node, one way.
        inter_bandwidth: Bytes per second between two nodes, one way, by all adapters of a node.
        latency: Seconds to start a message.
        adapters: Network adapters of a node.
        collectives: Measured collectives by place ("within a node" or "between nodes") and kind: seconds to start a
            round, and share of the bandwidth. Others use `latency` and 1.
    """

    intra_bandwidth: float
    inter_bandwidth: float
    latency: float
    ranks_per_node: int
    adapters: int = 1
    collectives: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Validate the numbers.

        Raises:
            PlanError: A number is out of range.
        """
        speeds = (self.intra_bandwidth, self.inter_bandwidth)
        if not (all(0 < s <= inf for s in speeds) and isfinite(self.latency) and self.latency >= 0):
            raise PlanError(
                f"{self!r} is invalid; bandwidths are above 0 bytes per second, the latency is 0 seconds or more"
            )
        if not all(type(n) is int and n >= 1 for n in (self.ranks_per_node, self.adapters)):
            raise PlanError(f"{self!r}: ranks_per_node and adapters must be whole numbers of 1 or more: correct them")
        of_kinds = [pair for kinds in self.collectives.values() for pair in kinds.items()]
        if not {*self.collectives} <= {WITHIN, BETWEEN} or not all(
            kind in get_args(Kind) and isfinite(start) and start >= 0 and 0 < share < inf
            for kind, (start, share) in of_kinds
        ):
            raise PlanError(
                f"{self!r} is invalid; collectives are by {WITHIN!r} or {BETWEEN!r}, then by one of"
                f" {', '.join(get_args(Kind))}: pairs of seconds, 0 or more, and a share above 0; calibrate again"
            )

    def bandwidth(self, ranks: int, *, inner: int = 1) -> float:
        """Return the bytes per second between neighbours in a ring.

        Args:
            inner: Ranks in the axes nested inside this group's.
        """
        if inner * ranks <= self.ranks_per_node:
            return self.intra_bandwidth
        rings = min(self.ranks_per_node, inner)
        return min(self.intra_bandwidth, self.inter_bandwidth / max(rings, self.adapters))

    def of_kind(self, kind: Kind, ranks: int, *, inner: int = 1) -> tuple[float, float]:
        """Return the seconds to start a round of a collective, and its bytes per second; see `bandwidth`."""
        place = WITHIN if inner * ranks <= self.ranks_per_node else BETWEEN
        start, share = self.collectives.get(place, {}).get(kind, (self.latency, 1.0))
        return start, share * self.bandwidth(ranks, inner=inner)


def rounds(kind: Kind, ranks: int) -> tuple[int, float]:
    """Return the rounds of a collective, and the share of a rank's contribution that it sends in each."""
    if kind in ("exchange", "all_to_all"):
        return 1, 1.0
    # in a round of a ring every rank sends one of G shards; those of an all-gather are complete contributions
    return (2 if kind == "all_reduce" else 1) * (ranks - 1), 1.0 if kind == "all_gather" else 1 / ranks


def collective_seconds(kind: Kind, n_bytes: float, ranks: int, links: Links, *, inner: int = 1) -> float:
    """Predict the seconds until every rank of the group has its result.

    Args:
        n_bytes: Bytes that each rank contributes; for an exchange, to all of its neighbours together.
        inner: Ranks in the axes nested inside this group's.
    """
    if ranks == 1:
        return 0.0
    start, bandwidth = links.of_kind(kind, ranks, inner=inner)
    times, part = rounds(kind, ranks)
    return times * (n_bytes * part / bandwidth + start)


SCHEMA = 2
"""Version of the JSON form. 2: `memory`, with what a process takes beside tensors, instead of `usable_bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of one device.

    Attributes:
        matmul_flops: Floating point operations of matrix products per second.
        memory_bytes: Bytes per second that elementwise operators read and write.
        attention_share: Share of matmul_flops that products of attention reach.
        device: Device with these rates, in words.
        launches: Whether a host launches operators asynchronously, as on a GPU.
        sdpa_share: Share of matmul_flops that attention in torch's fused kernels reaches.
        host_bandwidth: Bytes per second between device and host memory, one way.
        host_memory: Bytes per second that a device's share of the host's cores reads and writes.
        host_link: Both, measured, or None.
        memory: Memory of the GPU, and what a process takes of it beside tensors; None if it is not compared with.
        operators: Operators of a training step, measured on the device with these rates, or None.
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
    host_memory: float = ONE_CORE
    memory: DeviceMemory | None = None
    host_link: HostLink | None = None
    operators: MeasuredOperators | None = None

    def __post_init__(self) -> None:
        """Validate the numbers.

        Raises:
            PlanError: A number is out of range.
        """
        shares = (self.attention_share, self.sdpa_share)
        rates = (self.matmul_flops, self.memory_bytes, self.host_bandwidth, self.host_memory, *shares)
        if not all(is_number(n) and 0 < n < inf for n in rates) or not max(shares) <= 1:
            raise PlanError(
                f"{self!r} is invalid; rates are above 0, and shares of them are no more than 1: correct them"
            )
        if not (is_number(self.overhead_seconds) and 0 <= self.overhead_seconds < inf):
            raise PlanError(f"{self!r} is invalid; overhead_seconds is 0 or more: correct it")
        if type(self.launches) is not bool:
            raise PlanError(f"{self!r} is invalid; launches is true or false: correct it")
        if not isinstance(self.device, str) or not self.device.strip():
            raise PlanError(f"{self!r} is invalid; device is whose rates they are, in words: correct it")

    @property
    def device_type(self) -> str:
        """Device type as in torch: "cuda" for every device that launches operators."""
        return "cuda" if self.launches else "cpu"

    @property
    def host(self) -> HostLink:
        """The link to host memory: as measured, else by the data sheet."""
        return self.host_link or HostLink.alike(self.host_bandwidth, self.host_memory)

    def on_nodes_of(self, devices: int | None) -> "Rates":
        """Return the rates with this many devices per node; None does not change them."""
        return self if devices is None else replace(self, links=replace(self.links, ranks_per_node=devices))

    def to_json(self) -> str:
        """Return the rates as indented JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the text") -> "Rates":
        """Read the output of `to_json`.

        Raises:
            PlanError: Not JSON, another schema, fields that are missing or unknown, or numbers out of range.
        """
        try:
            plain: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"expected rates as JSON, {source} is not JSON: {error}; calibrate again") from error
        # not `plain` itself, if it is no mapping: the JSON text "1" would be equal to SCHEMA
        schema = plain.get("schema") if isinstance(plain, dict) else f"no mapping, but {plain!r}"
        if schema != SCHEMA:
            raise PlanError(f"expected rates of schema {SCHEMA}, {source} has schema {schema!r}; calibrate again")
        plain.pop("schema")
        try:
            memory = None if plain.get("memory") is None else DeviceMemory.of_json(plain["memory"])
            host = None if plain.get("host_link") is None else HostLink(**plain["host_link"])
            operators = None if plain.get("operators") is None else MeasuredOperators.of_json(plain["operators"])
            read = {"links": Links(**plain["links"]), "memory": memory, "host_link": host, "operators": operators}
            return cls(**{**plain, **read})
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            names = sorted(f.name for f in fields(cls))
            raise PlanError(
                f"{source} does not read as rates: {error}; their fields are {names}; calibrate again"
            ) from error

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
    """Return the kind of products under a Trainer's precision, as an argument of `rates_for`."""
    return "half" if precision.startswith(("bf16", "16")) else "float32"


def rates_for(device_name: str, *, products: str = "float32") -> Rates:
    """Return the rates of a device whose name contains one of the table, such as "NVIDIA A100-SXM4-40GB".

    Args:
        device_name: Name in torch, or "cpu".
        products: "float32", "tf32" if torch uses it, or "half" for bfloat16 and float16.

    Raises:
        PlanError: The table does not have the device.
    """
    found = _known(device_name)
    if found is None:
        raise PlanError(
            f"rates of {device_name!r} are not known; supported are names that contain one of"
            f" {', '.join(DEVICES)}: choose the one most like it and calibrate{meant(device_name, DEVICES, most=3)}"
        )
    rates = DEVICES[found]
    # devices of one name with other memory say so, as "NVIDIA A100-SXM4-80GB" does
    size = re.search(r"(\d+) ?GB", device_name, re.IGNORECASE)
    if size and found in MEMORY_GIB and found not in NAMED_BY_HOST and (gib := int(size.group(1))) != MEMORY_GIB[found]:
        rates = replace(rates, memory=DeviceMemory.of_sheet(gib), device=f"{rates.device} of {gib} GB")
    flops = PRODUCTS.get(products, {}).get(found)
    return rates if flops is None else replace(rates, matmul_flops=flops)


def budget_on(rates: Rates, device_memory: Any, devices: int = 1) -> tuple[Any, tuple[str, ...]]:
    """Return the bytes of tensors within the requested memory of a device, else within all of it, and a note on it."""
    return memory_of_tensors(rates.memory, device_memory, devices, device=rates.device)


def nearest_rates(device_name: str, *, memory_bytes: int, products: str = "float32") -> tuple[Rates, str]:
    """Return the rates of a GPU, and a sentence that names the other device whose rates are used, else "".

    Args:
        memory_bytes: Memory of the device.
        products: As in `rates_for`.
    """
    if _known(device_name):
        return rates_for(device_name, products=products), ""
    near = min(MEMORY_GIB, key=lambda name: abs(log(memory_bytes / 2**30 / MEMORY_GIB[name])))
    return rates_for(near, products=products), (
        f"the rates of {device_name!r} are not known: times are predicted for {DEVICES[near].device}, whose memory is"
        " nearest; `lightning-amp calibrate` measures them"
    )


def _known(device_name: str) -> str | None:
    # whole words: an A1000 is no A100, and a GH200 no H200
    words = (rf"(?<![a-z0-9]){name}(?![a-z0-9])" for name in DEVICES)
    return next((name for name, word in zip(DEVICES, words, strict=True) if re.search(word, device_name, re.I)), None)


MEMORY_GIB = {
    "RTX 3090": 24,
    "RTX 4090": 24,
    "A100": 40,
    "MI250X": 64,
    "H100": 80,
    "GH200": 96,
    "H200": 141,
    "B200": 180,
}
NAMED_BY_HOST = {"GH200"}
"""Devices whose name in torch has the memory of the host, as "NVIDIA GH200 480GB" has."""


def _gpu(
    name: str,
    *,
    teraflops: float,
    memory: float,
    link: float,
    network: float,
    host: float = 31.5,
    host_memory: float = 51.2,
    adapters: int = 8,
) -> Rates:
    """Return the rates of a GPU from its data sheet; bandwidths in gigabytes per second, of links one way."""
    inside, between = link * 1e9, adapters * network * 1e9
    links = Links(intra_bandwidth=inside, inter_bandwidth=between, latency=1e-5, ranks_per_node=8, adapters=adapters)
    return Rates(
        matmul_flops=teraflops * 1e12,
        memory_bytes=memory * 1e9,
        attention_share=0.7,
        overhead_seconds=15e-6,
        links=links,
        device=f"{'a' if name[0] in 'BG' else 'an'} {name}",
        launches=True,
        memory=DeviceMemory.of_sheet(MEMORY_GIB[name]),
        host_bandwidth=host * 1e9,
        host_memory=host_memory * 1e9,
    )


CPU_CORE = Rates(
    matmul_flops=140e9,
    memory_bytes=ONE_CORE,
    attention_share=1.0,
    overhead_seconds=8e-6,
    links=Links(intra_bandwidth=1e9, inter_bandwidth=1e9, latency=3e-4, ranks_per_node=64),
    device="one CPU core",
    sdpa_share=1.0,
)
DEVICES = {
    "cpu": CPU_CORE,
    "RTX 3090": _gpu("RTX 3090", teraflops=35.6, memory=936, link=31.5, network=25),
    "RTX 4090": _gpu("RTX 4090", teraflops=82.6, memory=1008, link=31.5, network=25),
    "A100": _gpu("A100", teraflops=19.5, memory=1555, link=300, network=25),
    "MI250X": _gpu("MI250X", teraflops=47.9, memory=1638, link=50, network=25, host=36, host_memory=25.6, adapters=4),
    "H100": _gpu("H100", teraflops=67, memory=3350, link=450, network=50, host=63, host_memory=76.8),
    "GH200": _gpu("GH200", teraflops=67, memory=4000, link=450, network=50, host=450, host_memory=512),
    "H200": _gpu("H200", teraflops=67, memory=4800, link=450, network=50, host=63, host_memory=76.8),
    "B200": _gpu("B200", teraflops=75, memory=8000, link=900, network=50, host=63, host_memory=89.6),
}
"""Rates by a part of the device's name."""
PRODUCTS = {
    "tf32": {"A100": 156e12, "H100": 494e12, "GH200": 494e12, "H200": 494e12, "B200": 1.1e15},
    "half": {
        **{"RTX 3090": 71e12, "RTX 4090": 165e12, "A100": 312e12, "MI250X": 191.5e12},
        **{"H100": 989e12, "GH200": 989e12, "H200": 989e12, "B200": 2.25e15},
    },
}
"""Operations per second of dense products in other types than float32; for a GeForce, TF32 is as fast as float32."""
