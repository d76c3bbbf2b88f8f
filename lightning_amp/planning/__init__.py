"""Which techniques a training run needs, from the data, the model and the devices; imports no torch."""
