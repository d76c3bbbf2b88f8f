"""Define the row of chunk in the table of techniques."""

from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.techniques.chunk.predict import add
from lightning_amp.techniques.chunk.spec import ChunkBlock
from lightning_amp.techniques.technique import Installer, Prediction, Technique

ROW = Technique(
    title="chunk",
    shrinks="inner tensors of a block to those of one chunk",
    specs=(ChunkBlock,),
    installers={
        ChunkBlock: Installer("lightning_amp.techniques.chunk.run.chunk_module:chunk_block", on_blocks=True, last=True)
    },
    look="lightning_amp.techniques.chunk.look:look",
    refusal="lightning_amp.techniques.chunk.look:refusal",
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS, TEMPORARIES),
        limit="the peak is outside of the blocks, or what they keep is whole between the chunks",
        turn=3,
        slow=True,
    ),
)
