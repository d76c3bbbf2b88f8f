"""What a user adds to a Trainer: memory monitor, prediction writer."""
