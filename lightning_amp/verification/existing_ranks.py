"""Ranks that exist already, told to Lightning, so that it starts none."""

from lightning.fabric.plugins.environments import ClusterEnvironment  # type: ignore[attr-defined]


class StartedRanks(ClusterEnvironment):
    """Processes that exist already, on one node, with their process group."""

    creates_processes_externally = True
    main_address = "localhost"
    main_port = 0

    def __init__(self, rank: int, ranks: int) -> None:
        """Be one of them."""
        self._rank, self._ranks = rank, ranks

    @staticmethod
    def detect() -> bool:
        """Never by itself."""
        return False

    def world_size(self) -> int:
        """Ranks in all."""
        return self._ranks

    def set_world_size(self, size: int) -> None:
        """It is known."""

    def global_rank(self) -> int:
        """This rank."""
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """It is known."""

    def local_rank(self) -> int:
        """This rank, for there is one node."""
        return self._rank

    def node_rank(self) -> int:
        """The only one."""
        return 0
