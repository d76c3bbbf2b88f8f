"""AMPStrategy: request, plan of the run, meshes, refusals."""
