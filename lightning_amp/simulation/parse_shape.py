"""Parse the sizes of a decoder from text, such as "anchors=113505,dim=128,strata=32,batch=1".

anchors, dim, strata      N, D, K; required, K up to 10,000
batch                     cells per rank and step
window                    anchors per attention bucket; default 20 K
features                  of every stratum; default N - k for stratum k
n_batches                 experimental batches; default 1
key                       attention (local; default), full_attention (without window) or convolution
variant                   higlue (default) or paper
chained                   yes or no (default)
"""

from dataclasses import dataclass

from lightning_amp.costs.model_shape import LARGEST, WINDOW_PER_STRATUM, DecoderShape
from lightning_amp.errors import PlanError

REQUIRED = ("anchors", "dim", "strata")
NUMBERS = (*REQUIRED, "batch", "window", "features", "n_batches")
CHOICES = {
    "key": ("attention", "full_attention", "convolution"),
    "variant": ("higlue", "paper"),
    "chained": ("no", "yes"),
}
MOST_STRATA = 10_000
"""Most strata: every stratum is a module, and more modules would fill the memory of this process."""
DIGITS = 9
EXAMPLE = "anchors=5400,dim=128,strata=32,batch=1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeRequest:
    """Sizes of a decoder, and the cells of a step if the text has them."""

    decoder: DecoderShape
    batch_size: int | None


def parse_shape(text: str) -> ShapeRequest:
    """Parse the sizes of a decoder.

    Raises:
        PlanError: Not `name=value` pairs, a name or value that is not allowed, or sizes that no decoder can have.
    """
    values = _pairs(text)
    numbers = {name: _number(name, values[name], text) for name in NUMBERS if name in values}
    missing = [name for name in REQUIRED if name not in numbers]
    if missing:
        raise _refusal(text, f"nothing was found for {', '.join(missing)}", f"a size for {', '.join(REQUIRED)}")
    choices = {name: values.get(name, allowed[0]) for name, allowed in CHOICES.items()}
    for name, allowed in CHOICES.items():
        if choices[name] not in allowed:
            raise _refusal(text, f"{name}={choices[name]!r} was found", f"{name}={' or '.join(allowed)}")
    _check_sizes(text, numbers, choices)
    anchors, strata, full = numbers["anchors"], numbers["strata"], choices["key"] == "full_attention"
    decoder = DecoderShape(
        fqn="decoder",
        anchors=anchors,
        dim=numbers["dim"],
        features=tuple(numbers.get("features", anchors - k) for k in range(strata)),
        distances=tuple(range(strata)),
        attention=choices["key"] != "convolution",
        full=full,
        known_from="as the shape says",
        window=1 if full else numbers.get("window", WINDOW_PER_STRATUM * strata),
        chained=choices["chained"] == "yes",
        variant=choices["variant"],
        n_batches=numbers.get("n_batches", 1),
    )
    return ShapeRequest(decoder=decoder, batch_size=numbers.get("batch"))


def _pairs(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in (*NUMBERS, *CHOICES):
            names = ", ".join((*NUMBERS, *CHOICES))
            raise _refusal(text, f"{part.strip()!r} was found", f"name=value with one of the names {names}")
        if name in values:
            raise _refusal(text, f"{name!r} was found twice", "each name once")
        values[name] = value
    return values


def _number(name: str, value: str, text: str) -> int:
    largest = MOST_STRATA if name == "strata" else LARGEST
    # int() raises for thousands of digits
    if not value.isdecimal() or len(value) > DIGITS or not 1 <= int(value) <= largest:
        raise _refusal(text, f"{name}={value!r} was found", f"a whole number from 1 to {largest:,}")
    return int(value)


def _check_sizes(text: str, numbers: dict[str, int], choices: dict[str, str]) -> None:
    anchors = numbers["anchors"]
    for name in ("strata", "features"):
        if numbers.get(name, 1) > anchors:
            raise _refusal(text, f"{name}={numbers[name]!r} was found", f"as many as anchors={anchors!r}, or fewer")
    if choices["key"] == "full_attention" and "window" in numbers:
        raise _refusal(text, f"window={numbers['window']!r} was found", "no window with key=full_attention")
    if choices["key"] == "attention" and numbers["dim"] % 2:
        raise _refusal(text, f"dim={numbers['dim']!r} was found", "an even dim, or another key than attention")
    if choices["key"] == "convolution" and choices["chained"] == "yes":
        raise _refusal(text, "chained=yes with key=convolution was found", "chained=yes with key=attention")


def _refusal(text: str, found: str, allowed: str) -> PlanError:
    return PlanError(f"shape={text!r} is not supported; {found}; allowed is {allowed}; write for example {EXAMPLE!r}")
