"""Choose the techniques of a training run from the data, the model and the devices; imports no torch."""
