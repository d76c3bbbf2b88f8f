"""Define the row of replay in the table of techniques."""

from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.techniques.replay.predict import add
from lightning_amp.techniques.replay.spec import ReplayOperators
from lightning_amp.techniques.technique import Installer, Prediction, Technique

ROW = Technique(
    title="replay of operators",
    shrinks="what autograd keeps of any code to what stretches of it read",
    specs=(ReplayOperators,),
    installers={ReplayOperators: Installer("lightning_amp.techniques.replay.install:install")},
    look="lightning_amp.techniques.replay.install:look",
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="one operator needs as much by itself, or the peak is in the optimiser's step",
        turn=4,
        slow=True,
    ),
)
