"""Copy a module and a batch as tensors without values, and run a step of the copy without side effects."""
