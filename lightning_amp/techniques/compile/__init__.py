"""Run blocks of any module, or strata of a Hi-C decoder, through torch.compile."""
