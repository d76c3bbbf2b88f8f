"""The steps of a module whose blocks are stages: micro-batches, what they may not leave behind, what all ranks log."""
