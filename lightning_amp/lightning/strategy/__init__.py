"""AMPStrategy: request, mesh of the ranks, plan of the run, refusals."""
