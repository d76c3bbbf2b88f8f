"""Check the settings of the reference model before its networks are built."""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from lightning_amp.errors import ModelError
from lightning_amp.models.decoders.stratified import KeyKind
from lightning_amp.models.decoders.stratum_keys import Variant

Stage = Literal["finetune", "pretrain"]
Representation = Literal["counts", "pca"]
REP_DIM = 50
"""Components that encoders read by default."""
CHOICES = {"stage": Stage, "key": KeyKind, "variant": Variant, "use_rep": Representation}


def check_settings(*, hidden_depth: int, rep_dim: int | Mapping[str, int], **chosen: str) -> None:
    """Raise a ModelError for a setting that is none of its choices, or too small a number; `chosen` as in `CHOICES`."""
    for name, value in chosen.items():
        if value not in (allowed := get_args(CHOICES[name])):
            raise ModelError(f"GLUE({name}={value!r}): choose one of {allowed!r}")
    if hidden_depth < 1:
        raise ModelError(f"GLUE(hidden_depth={hidden_depth!r}): an encoder needs at least one hidden layer")
    if min(rep_dim.values(), default=1) < 1 if isinstance(rep_dim, Mapping) else rep_dim < 1:
        raise ModelError(f"GLUE(rep_dim={rep_dim!r}): at least one component is needed")


def components_of(modality: str, rep_dim: int | Mapping[str, int]) -> int:
    """Return the number of components of a modality."""
    return rep_dim.get(modality, REP_DIM) if isinstance(rep_dim, Mapping) else rep_dim


def check_names(setting: str, values: Mapping[str, float] | None, modalities: Iterable[str]) -> None:
    """Raise a ModelError for values of modalities that the data do not have."""
    known = list(modalities)
    if strangers := sorted(set(values or {}) - set(known)):
        raise ModelError(
            f"GLUE({setting}={values!r}) names {strangers!r}, but the data have {known!r}; name these only"
        )
