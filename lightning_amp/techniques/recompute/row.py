"""Define the row of recompute (activation checkpointing) in the table of techniques."""

from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.techniques.hic.strata.rows import RecomputeStrata
from lightning_amp.techniques.recompute.predict import add
from lightning_amp.techniques.recompute.spec import RecomputeBlock
from lightning_amp.techniques.technique import Installer, Prediction, Technique, on_decoder

ROW = Technique(
    title="recompute",
    shrinks="K strata to one, or a block to its inputs, computed twice",
    specs=(RecomputeStrata, RecomputeBlock),
    installers={
        RecomputeStrata: Installer(
            "lightning_amp.techniques.hic.strata.recompute:recompute_strata", on_decoder=True
        ),
        RecomputeBlock: Installer(
            "lightning_amp.techniques.recompute.recompute:recompute_block", on_blocks=True, last=True
        ),
    },
    targets=on_decoder(lambda _: RecomputeStrata()),
    choice=("activations", "recompute"),
    conflicts={
        "stream": "both say what is kept of a stratum; stream keeps as little and computes it once",
    },
    refusal="lightning_amp.techniques.recompute.look:refusal",
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="the blocks keep little except their inputs, or one of them needs as much by itself",
        turn=2,
    ),
)
