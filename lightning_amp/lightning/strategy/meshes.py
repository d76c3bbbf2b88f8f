"""Device meshes with the axes "data" and "model", made once for a shape: their process groups are never given back."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_amp.errors import PlanError


class Meshes:
    """The meshes of one process."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], DeviceMesh] = {}

    def of(self, device_type: str, *, ranks: int, model_ranks: int) -> DeviceMesh:
        """The mesh of all ranks; row-major, so that consecutive ranks are a model group.

        Args:
            device_type: "cpu" or "cuda".
            ranks: All ranks of the run.
            model_ranks: Ranks of the model axis.

        Raises:
            PlanError: The model axis does not divide the ranks.
        """
        shape = (ranks // model_ranks, model_ranks)
        if shape[0] * shape[1] != ranks:
            raise PlanError(
                f"model_parallel_size={model_ranks!r} was asked for, the run has {ranks}"
                " ranks; it must divide them. Change `devices` or `num_nodes` of the Trainer, or model_parallel_size"
            )
        if shape not in self._made:
            self._made[shape] = init_device_mesh(device_type, shape, mesh_dim_names=("data", "model"))
        return self._made[shape]
