"""Distribution of the model over the workers: one value for both the driver's axes and the workers' device mesh.

With one source, an axis cannot have different names or orders on the driver and in the workers. The driver's half needs
no torch. Called by `policy` (axes) and `worker` (mesh).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raylane.workers.sharding import NamedSharding

if TYPE_CHECKING:
    from raylane.sft.config import RunConfig

__all__ = ["ParallelDims"]

REPLICATE = "dp_replicate"
SHARD = "dp_shard"


@dataclass(frozen=True)
class ParallelDims:
    """Data parallelism on two axes: `dp_replicate` copies of a model, each held by `dp_shard` workers together.

    Ranks are laid out row-major, so the workers of one copy have consecutive ranks. They are on one node if the node
    has room for them, which keeps the traffic of sharding inside the node.
    """

    dp_replicate: int = 1
    dp_shard: int = 1

    def __post_init__(self) -> None:
        if self.dp_replicate < 1 or self.dp_shard < 1:
            raise ValueError(f"dp_replicate and dp_shard must be at least 1, got {self}")

    @classmethod
    def of(cls, config: RunConfig) -> ParallelDims:
        """Return the sizes in the configuration, which were checked when it was loaded."""
        replicas = config.policy.dtensor_cfg.dp_replicate_size
        return cls(replicas, config.cluster.num_workers // replicas)

    @property
    def axes(self) -> tuple[str, str]:
        """Names of the axes, outermost first."""
        return (REPLICATE, SHARD)

    @property
    def world(self) -> int:
        """Number of workers; each reads its own part of a batch."""
        return self.dp_replicate * self.dp_shard

    def named_sharding(self) -> NamedSharding:
        """Return the axes for the driver's worker group."""
        return NamedSharding.of(**{REPLICATE: self.dp_replicate, SHARD: self.dp_shard})

    def device_mesh(self, device_type: str) -> Any:
        """Return the workers' mesh: two axes for HSDP, one for FSDP. Collective, after init_process_group."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.dp_replicate == 1:
            return init_device_mesh(device_type, (self.dp_shard,), mesh_dim_names=(SHARD,))
        return init_device_mesh(device_type, (self.dp_replicate, self.dp_shard), mesh_dim_names=self.axes)
