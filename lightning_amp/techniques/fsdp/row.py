"""Define the row of fsdp in the table of techniques."""

from lightning_amp.footprint.module_profile import GRADIENTS, PARAMETERS, STATE
from lightning_amp.techniques.fsdp.predict import add, variants
from lightning_amp.techniques.fsdp.spec import FullyShard
from lightning_amp.techniques.technique import Prediction, Technique

ROW = Technique(
    title="fully sharded data parallel",
    shrinks="parameters, gradients and optimiser state to those of a rank",
    specs=(FullyShard,),
    targets=lambda shape: [(fqn, FullyShard()) for fqn in (*shape.blocks, "")],
    data_axis=True,
    no_decoder="fsdp gathers what a forward needs when it is called, and a decomposed decoder's strata are run in"
    " parts",
    look="lightning_amp.techniques.fsdp.look:look",
    refusal="lightning_amp.techniques.fsdp.look:refusal",
    prediction=Prediction(
        add=add,
        kinds=(PARAMETERS, GRADIENTS, STATE),
        limit="what is gathered together is whole while it works",
        turn=0,
        fewest=2,
        counted=False,
        variants=variants,
    ),
)
