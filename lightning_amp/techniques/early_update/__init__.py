"""Update parameters within the backward pass, as soon as their gradients are complete."""
