"""Run the blocks of a rank's stages, and send what other stages need."""
