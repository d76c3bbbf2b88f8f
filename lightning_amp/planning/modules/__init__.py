"""Plan any LightningModule from the profile of its training step."""
