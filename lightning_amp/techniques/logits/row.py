"""Define the row of logits in the table of techniques."""

from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.techniques.logits.predict import add
from lightning_amp.techniques.logits.spec import ChunkLogits
from lightning_amp.techniques.technique import Installer, Prediction, Technique

ROW = Technique(
    title="cross-entropy in chunks",
    shrinks="logits of a training step, and their gradients, to those of a few rows",
    specs=(ChunkLogits,),
    installers={ChunkLogits: Installer("lightning_amp.techniques.logits.install:install")},
    prediction=Prediction(
        add=add, kinds=(ACTIVATIONS, TEMPORARIES), limit="the peak is elsewhere", turn=1, slow=True
    ),
)
