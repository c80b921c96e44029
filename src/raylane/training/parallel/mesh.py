"""Distribution of the model over the workers: one value for both the driver's axes and the workers' process groups.

With one source, an axis cannot have different names or orders on the driver and in the workers. The driver's half needs
no torch. Called by `policy` (axes), `layout` (sizes) and `worker` (process groups).

    pp            pipeline parallelism: a worker holds some of the layers
    dp_replicate  copies of the model
    dp_shard      workers that share one copy (FSDP2); each reads rows of its own, as do the copies
    cp            context parallelism: a worker holds a part of each row; weights are sharded over cp as well
    tp            tensor parallelism: a worker holds a part of each weight matrix
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raylane.training.config.policy import DTensorConfig, PolicyConfig
from raylane.workers.sharding import NamedSharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WHOLE_BYTES = 2**30
"""Largest training state (weights, gradients, averages of AdamW) that every worker holds whole by default."""

_GATHERED_BYTES = 2**30
"""Largest weights, in the computing precision, that FSDP2 keeps gathered during a whole step."""

_STATE_BYTES = 16
"""Bytes of training state per parameter, all in float32."""

SHARED_BYTES = 2**30
"""Largest memory that the CPU workers of one host share to sum gradients; more than this is summed by an all-reduce."""

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Names of the axes, outermost first."""

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes along which workers have different rows."""

COPY_AXES = ("pp", "cp", "tp")
"""Axes along which workers have the same rows."""


@dataclass(frozen=True)
class ParallelDims:
    """Number of workers on each axis.

    Ranks are laid out row-major in the order of `AXES`, so the workers of one tensor-parallel group have consecutive
    ranks, then those of one context-parallel group, and so on. Axes with more traffic thus stay inside a node.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise ValueError(f"every size must be at least 1, got {self}")

    @classmethod
    def of(cls, settings: DTensorConfig, num_workers: int) -> ParallelDims:
        """Return the sizes in the configuration, which were checked when it was loaded."""
        pp, replicas = settings.pipeline_parallel_size, settings.dp_replicate_size
        cp, tp = settings.context_parallel_size, settings.tensor_parallel_size
        return cls(pp, replicas, num_workers // (pp * replicas * cp * tp), cp, tp)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes, in the order of `AXES`."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.readers * self.copies

    @property
    def readers(self) -> int:
        """Number of different parts of a batch; the workers of one part have the same rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def copies(self) -> int:
        """Number of workers with the same rows."""
        return self.pp * self.cp * self.tp

    @property
    def row_multiple(self) -> int:
        """Number of tokens of which any row can be divided, with or without sequence parallelism."""
        return 2 * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on every axis."""
        return self.named_sharding.get_worker_coords(rank)

    def reader(self, rank: int) -> int:
        """Return which part of a batch a rank reads, from 0."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ in their place on one axis only, in the order of that place."""
        layout = np.moveaxis(self.named_sharding.layout, AXES.index(axis), -1)
        groups: list[list[int]] = layout.reshape(-1, layout.shape[-1]).tolist()
        return groups

    @functools.cached_property
    def named_sharding(self) -> NamedSharding:
        """Axes of the driver's worker group."""
        return NamedSharding.of(**dict(zip(AXES, self.sizes, strict=True)))


@dataclass(frozen=True)
class WorkerMesh:
    """Process groups of one worker. A group of one worker is None."""

    dims: ParallelDims
    rank: int
    fsdp: DeviceMesh
    """Workers that share the weights: one axis, or two with copies. Context-parallel workers share weights too."""
    tp: DeviceMesh | None
    cp_group: Any
    pp_group: Any
    tied_group: Any
    """First and last pipeline stage; None in the stages between."""

    @classmethod
    def make(cls, dims: ParallelDims, rank: int, device_type: str) -> WorkerMesh:
        """Make the groups of this rank. Collective, after init_process_group."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {"pp": dims.pp, "dp_replicate": dims.dp_replicate, "fsdp": dims.dp_shard * dims.cp, "tp": dims.tp}
        # An axis of one worker would cost process groups and name nothing.
        used = {name: size for name, size in sizes.items() if size > 1 or name == "fsdp"}
        # FSDP2 combines its mesh with that of tensor parallelism, so both must be parts of one mesh.
        whole = init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))
        pipelines = dims.groups("pp")
        # Embedding and tied head are in the first and the last stage.
        ends = [[ranks[0], ranks[-1]] for ranks in pipelines]
        return cls(
            dims=dims,
            rank=rank,
            fsdp=whole["dp_replicate", "fsdp"] if dims.dp_replicate > 1 else whole["fsdp"],
            tp=whole["tp"] if dims.tp > 1 else None,
            cp_group=_own_group(dims.groups("cp")) if dims.cp > 1 else None,
            pp_group=whole.get_group("pp") if dims.pp > 1 else None,
            tied_group=_own_group(ends) if dims.pp > 1 else None,
        )

    @property
    def reader(self) -> int:
        """Part of a batch that this worker reads."""
        return self.dims.reader(self.rank)

    def chunks(self, row_tokens: int) -> list[tuple[int, int]]:
        """Return (start, stop) of this worker's parts of a row."""
        return local_chunks(row_tokens, self.dims.coordinates(self.rank)["cp"], self.dims.cp)

    @property
    def random_stream(self) -> int:
        """Number of this worker's random numbers. Tensor-parallel workers share them: they drop the same values."""
        place = self.dims.coordinates(self.rank)
        return self.reader + self.dims.readers * (place["cp"] + self.dims.cp * place["pp"])

    @property
    def stage(self) -> int:
        """Place of this worker in the pipeline, from 0."""
        return self.dims.coordinates(self.rank)["pp"]


def local_chunks(row_tokens: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the parts of a row that a rank of `size` context-parallel ranks holds."""
    if size == 1:
        return [(0, row_tokens)]
    if row_tokens % (2 * size):
        raise ValueError(f"a row of {row_tokens} tokens does not divide into 2 x {size} equal parts")
    part = row_tokens // (2 * size)
    return [(i * part, (i + 1) * part) for i in (rank, 2 * size - 1 - rank)]


def _own_group(groups: list[list[int]]) -> Any:
    """Make process groups and return that of this rank, or None. Collective."""
    from torch.distributed import new_subgroups_by_enumeration

    return new_subgroups_by_enumeration(groups)[0]  # type: ignore[no-untyped-call]


def shards_parameters(policy: PolicyConfig, workers: int, num_parameters: int) -> bool:
    """Return True if FSDP2 shards a model of this size over so many workers, False if each worker holds all of it.

    FSDP2 costs time per layer and per parameter tensor, whatever their size (docs/design/sft-compute.md). So `auto`
    leaves a model whole if sharding saves no memory or little memory. What only FSDP2 can do (bfloat16 copies of
    float32 weights, offloading, gradients reduced after every micro-batch) needs FSDP2 in any case.
    """
    settings = policy.dtensor_cfg
    if policy.megatron_cfg.enabled:
        return False
    # FSDP2 also sums the gradients of the workers that hold the same part of a divided model.
    if max(settings.tensor_parallel_size, settings.pipeline_parallel_size, settings.expert_parallel_size) > 1:
        return True
    if settings.shard_parameters != "auto":
        return settings.shard_parameters == "always"
    # A plain module would compute in float32, and have no place for float32 masters beside bfloat16 weights.
    if policy.precision != "float32" or settings.cpu_offload or settings.reduce_every_micro_batch:
        return True
    return workers > 1 and num_parameters * _STATE_BYTES > _WHOLE_BYTES


def keeps_gathered(policy: PolicyConfig, num_parameters: int) -> bool:
    """Return True if FSDP2 gathers the weights once per step, False if once per forward and once per backward pass.

    Communication takes time on every network, and 1 GiB is little. Settings that trade time for memory switch it off.
    """
    settings = policy.dtensor_cfg
    if settings.reduce_every_micro_batch or settings.activation_checkpointing or settings.cpu_offload:
        return False
    return num_parameters * (2 if policy.precision == "bfloat16" else 4) <= _GATHERED_BYTES


def shares_gradients(numel: int, workers: int, limit_bytes: int = SHARED_BYTES) -> bool:
    """Return True if CPU workers of one host sum float32 gradients of this size in shared memory."""
    return workers > 1 and (workers + 1) * numel * 4 <= limit_bytes
