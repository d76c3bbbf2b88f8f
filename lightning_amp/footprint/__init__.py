"""Profile the memory of any LightningModule's training step, by kind, module and tensor, before it runs."""
