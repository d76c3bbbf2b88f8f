"""Memory model: kept tensors and temporaries -> peak bytes."""
