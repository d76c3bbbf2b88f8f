"""Callbacks for a Trainer: memory monitor and prediction writer."""
