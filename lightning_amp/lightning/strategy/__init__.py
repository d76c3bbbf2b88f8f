"""Define AMPStrategy: its options, device mesh, planning context, plan installation and refusals."""
