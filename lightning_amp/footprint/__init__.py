"""Count the bytes of a training step of any LightningModule, by kind, module and tensor, before it runs."""
