"""raylane in vLLM's own interface for weight updates, under the name `raylane` in both of its factories.

A user of that interface changes the backend's name. What its other backends send through `update_weights` lies in
raylane's versions here: only their number is sent.

    trainer                            vLLM's client                       workers
    send_weights: publish ──version──> start, update, finish  ──version──> take the version
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ray
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from raylane.errors import WeightsError
from raylane.weights.engines.vllm_worker import loading_subscriber
from raylane.weights.publisher import Publisher


@dataclass
class RaylaneInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Options of the workers, which the trainer sends once."""

    name: str
    address: str
    """Address of Ray's control store."""
    job: str
    """Ray job (hexadecimal id) of the trainer."""
    detached: bool = False
    timeout: float | None = None


@dataclass
class RaylaneUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Message to the workers for each update."""

    version: int


class RaylaneTransferEngine(WeightTransferEngine[RaylaneInitInfo, RaylaneUpdateInfo]):  # type: ignore[misc]
    """The end of a worker."""

    init_info_cls = RaylaneInitInfo
    update_info_cls = RaylaneUpdateInfo
    supports_draft_weight_update = False
    _subscriber: Any = None

    def init_transfer_engine(self, init_info: RaylaneInitInfo) -> None:
        """Register this worker as a reader, and record how its model loads weights."""
        self.shutdown()  # a trainer that was started again initializes the engine again
        options = {name: getattr(init_info, name) for name in ("name", "address", "job", "detached", "timeout")}
        self._subscriber = loading_subscriber(self.vllm_config, self.model, options)

    def start_weight_update(self) -> None:
        """Do nothing: versions are whole."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take a version; waits until all ranks of the trainer have published it."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RaylaneUpdateInfo) -> None:
        """Take a version, or a later one."""
        if self._subscriber is None:
            raise WeightsError("call init_weight_transfer_engine before update_weights")
        self._subscriber.wait_for(update_info.version)

    def finish_weight_update(self) -> None:
        """Do nothing: the version was taken at once."""

    def shutdown(self) -> None:
        """Leave; the model keeps its weights."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None


@dataclass
class RaylaneTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """How a trainer publishes."""

    backend: ClassVar[str] = "raylane"
    name: str = "policy"
    """Name of the weights."""
    world: int = 1
    """Number of the trainer's ranks."""
    keep: int = 2
    detached: bool = False
    timeout: float | None = None


class RaylaneTrainerEngine(TrainerWeightTransferEngine[RaylaneTrainerInitInfo]):  # type: ignore[misc]
    """The end of a rank of a trainer.

    A `ModuleSource` is published as it lies: each rank writes its own shards, without a gather. Of other sources rank 0
    publishes what it iterates over.
    """

    init_info_cls = RaylaneTrainerInitInfo

    def __init__(self, init_info: RaylaneTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._sharded = isinstance(source, ModuleSource)
        self._step = 0
        # The module itself, not what the source yields: iterating gathers whole tensors.
        self._tensors: Any = source._module if self._sharded else dict(source)
        options = {name: getattr(init_info, name) for name in ("keep", "detached", "timeout")}
        self._publisher: Publisher | None = None
        if self._sharded:
            options |= {"rank": init_info.rank, "world": init_info.world}
        if self._sharded or self.is_sender:
            self._publisher = Publisher(init_info.name, self._tensors, **options)

    @classmethod
    def trainer_init(cls, init_info: RaylaneTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Register this rank; rank 0 also lets the workers of vLLM register. Called on every rank."""
        if source is None:
            raise ValueError("raylane publishes a source of weights: pass source=ModuleSource(model)")
        self = cls(init_info, client=client, source=source)
        if self.is_sender:
            context = ray.get_runtime_context()
            known = {"name": init_info.name, "address": context.gcs_address, "job": context.get_job_id()}
            more = {"detached": init_info.detached, "timeout": init_info.timeout}
            client.init_weight_transfer_engine(known | more)
        return self

    def send_weights(self) -> None:
        """Publish the present weights, and let the engines take them; rank 0 waits for these. Called on every rank."""
        self._step += 1
        if not self._sharded:
            self._tensors.update(dict(self.source))  # also where nothing is published: it may be a collective
        if self._publisher is None:
            return
        version = self._publisher.publish(self._step)
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"version": version})
            self.client.finish_weight_update(str(version))

    def shutdown(self) -> None:
        """Close this rank's end; versions stay."""
        if self._publisher is not None:
            self._publisher.close()
