"""Define sharded tensors: splits over mesh axes, collectives with gradients, and operators on sharded tensors."""
