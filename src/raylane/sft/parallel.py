"""Distribution of the model over the workers: one value for both the driver's axes and the workers' device mesh.

With one source, an axis cannot have different names or orders on the driver and in the workers. The driver's half needs
no torch. Called by `policy` (axes) and `worker` (mesh).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raylane.workers.sharding import NamedSharding

if TYPE_CHECKING:
    from raylane.sft.config import PolicyConfig, RunConfig

__all__ = ["ParallelDims", "keeps_gathered", "shards_parameters"]

_WHOLE_BYTES = 2**30
"""Largest training state (weights, gradients, averages of AdamW) that every worker holds whole by default."""

_GATHERED_BYTES = 2**30
"""Largest weights, in the computing precision, that FSDP2 keeps gathered during a whole step."""

_STATE_BYTES = 16
"""Bytes of training state per parameter, all in float32."""

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


def shards_parameters(policy: PolicyConfig, dp_shard: int, num_parameters: int) -> bool:
    """Return True if FSDP2 shards a model of this size over `dp_shard` workers, False if each worker holds all of it.

    FSDP2 costs time per layer and per parameter tensor, whatever their size (docs/design/sft-compute.md). So `auto`
    leaves a model whole if sharding saves no memory or little memory. What only FSDP2 can do (bfloat16 copies of
    float32 weights, offloading, gradients reduced after every micro-batch) needs FSDP2 in any case.
    """
    settings = policy.dtensor_cfg
    if settings.shard_parameters != "auto":
        return settings.shard_parameters == "always"
    # A plain module would compute in float32, and have no place for float32 masters beside bfloat16 weights.
    if policy.precision != "float32" or settings.cpu_offload or settings.reduce_every_micro_batch:
        return True
    return dp_shard > 1 and num_parameters * _STATE_BYTES > _WHOLE_BYTES


def keeps_gathered(policy: PolicyConfig, num_parameters: int) -> bool:
    """Return True if FSDP2 gathers the weights once per step, False if once per forward and once per backward pass.

    Communication takes time on every network, and 1 GiB is little. Settings that trade time for memory switch it off.
    """
    settings = policy.dtensor_cfg
    if settings.reduce_every_micro_batch or settings.activation_checkpointing or settings.cpu_offload:
        return False
    return num_parameters * (2 if policy.precision == "bfloat16" else 4) <= _GATHERED_BYTES
