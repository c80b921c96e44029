"""How the model is spread over the workers: one value that makes both the driver's axes and the workers' device mesh.

Because both come from here, an axis cannot have one name or order on the driver and another in the workers. The driver
needs no torch for its half. Called by `policy` (axes) and `worker` (mesh).
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
    """Data parallelism on two axes: `dp_replicate` copies of a model that `dp_shard` workers hold together.

    Ranks are laid out row-major, so the workers of one copy have consecutive ranks (and sit on one node where a node
    has room for them, which is where sharding's traffic belongs).
    """

    dp_replicate: int = 1
    dp_shard: int = 1

    def __post_init__(self) -> None:
        if self.dp_replicate < 1 or self.dp_shard < 1:
            raise ValueError(f"axes have at least one coordinate each, got {self}")

    @classmethod
    def of(cls, config: RunConfig) -> ParallelDims:
        """As the configuration says; its sizes were checked when it was loaded."""
        replicas = config.policy.dtensor_cfg.dp_replicate_size
        return cls(replicas, config.cluster.num_workers // replicas)

    @property
    def axes(self) -> tuple[str, str]:
        """Axis names, outermost first."""
        return (REPLICATE, SHARD)

    @property
    def world(self) -> int:
        """Workers in all; each reads its own part of a batch."""
        return self.dp_replicate * self.dp_shard

    def named_sharding(self) -> NamedSharding:
        """The driver's view."""
        return NamedSharding.of(**{REPLICATE: self.dp_replicate, SHARD: self.dp_shard})

    def device_mesh(self, device_type: str) -> Any:
        """The workers' view: two mesh axes for HSDP, one for FSDP. Collective; needs torch.distributed initialised."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.dp_replicate == 1:
            return init_device_mesh(device_type, (self.dp_shard,), mesh_dim_names=(SHARD,))
        return init_device_mesh(device_type, (self.dp_replicate, self.dp_shard), mesh_dim_names=self.axes)
