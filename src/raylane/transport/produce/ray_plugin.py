"""raylane as a tensor transport of Ray: for programs that are written for Ray's own direct transport.

Ray decides when a value is published, fetched and freed, and calls the class below; raylane moves the bytes. The limits
of Ray's direct transport hold, such as that only results of actors' methods and of `ray.put` travel this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from raylane import _ray
from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.transport.backends.registry import check_name
from raylane.transport.link.endpoint import endpoint
from raylane.transport.produce.options import PublishOptions
from raylane.transport.produce.publication import Publication, publish_leaves, stays_on_device
from raylane.transport.read.deliver import PLAIN, Delivery
from raylane.transport.read.unpickling import Pending, fit
from raylane.transport.value import codec
from raylane.transport.value.ticket import decode_ticket, encode_ticket


@dataclass
class RaylaneMetadata(_ray.TensorTransportMetadata):  # type: ignore[misc]  # untyped base
    """The ticket of a value, which Ray carries to the readers; the other fields are Ray's."""

    ticket: bytes = b""
    """Empty for a value without tensors."""
    skeleton: bytes = b""


class RaylaneTransport(_ray.TensorTransportManager):  # type: ignore[misc]  # untyped base
    """Tensor transport of Ray that publishes and reads as `raylane.put` and `raylane.get` do. Ray creates instances."""

    name = "RAYLANE"
    transport = "auto"
    """Transport of raylane that readers use."""

    def tensor_transport_backend(self) -> str:
        """Return the name by which Ray knows this transport."""
        return self.name

    @staticmethod
    def is_one_sided() -> bool:
        """Return True: readers need no help of Ray in the source."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Return True: a read ends by itself when its source dies or its deadline passes, and harms neither process."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return True: an actor in which raylane cannot be imported fails when Ray registers the transport there."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> RaylaneMetadata:
        """Publish tensors and return their ticket; they stay in this process until `garbage_collect`."""
        # Ray compares the number of these with the number of received tensors, and their shapes with target buffers.
        described = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        device = rdt_object[0].device.type if rdt_object else None
        if not rdt_object:
            return RaylaneMetadata(described, device)
        for tensor in rdt_object:
            if not codec.is_leaf(tensor):
                raise TypeError(
                    f"raylane moves dense CPU and CUDA tensors for Ray, got a {type(tensor).__name__} with layout "
                    f"{tensor.layout} on {tensor.device}. Return such values through raylane.method"
                )
        skeleton, leaves = codec.encode_value(list(rdt_object))
        # No anchor: Ray counts the refs of its object, and calls `garbage_collect` after the last one.
        options = PublishOptions(tensor_transport=self.transport)
        publication = Publication(options, anchored=False, origin="Ray's direct transport")
        layout = codec.plan_layout(leaves, in_place=stays_on_device(leaves, options))
        ticket = publish_leaves(endpoint(), leaves, layout, publication)
        return RaylaneMetadata(described, device, encode_ticket(ticket), skeleton)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        """Return Ray's empty record: the ticket says where the source is."""
        return _ray.CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Return the tensors of a value, in `target_buffers` if given. Waits RAYLANE_TIMEOUT_S at most.

        Raises a TransportError.
        """
        # Ray also moves values that turned out to have no tensors.
        if not tensor_transport_metadata.ticket:
            return []
        # Ray passes no timeout of `ray.get` on to transports.
        pending = Pending(decode_ticket(tensor_transport_metadata.ticket), tensor_transport_metadata.skeleton)
        # Straight from the wire into the target buffers, where their layout allows it.
        (wish,) = fit([pending], [Delivery(into=target_buffers) if target_buffers else PLAIN])
        tensors: list[Any] = pending.redeem(None, Deadline(settings.TIMEOUT_S.read()), may_call_ray=False, wish=wish)
        return tensors

    def send_multiple_tensors(
        self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        """Raise NotImplementedError: Ray does not call this for one-sided transports."""
        raise NotImplementedError("raylane's readers fetch the tensors by themselves")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        """Free a published value."""
        if tensor_transport_meta.ticket:
            # The entry alone; the tensors belong to Ray's store, which drops them after this call.
            endpoint().store.free([decode_ticket(tensor_transport_meta.ticket).key])

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Do nothing: a read ends by itself (see `can_abort_transport`)."""


def register_with_ray(name: str = "RAYLANE", *, tensor_transport: str = "auto") -> None:
    """Make raylane available to Ray as `@ray.method(tensor_transport=name)` and `ray.put(..., _tensor_transport=name)`.

    Call it in the process that creates the actors, before their class is defined: Ray checks the name in `ray.method`.
    Ray passes the registration on to the actors, which need raylane installed. An actor that calls `ray.put` with the
    name calls this function first, because Ray may be later. A second call with the same arguments does nothing.

    Args:
        name: The name for Ray, which Ray writes in capitals.
        tensor_transport: The transport of raylane that readers use, as in `raylane.method`.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string such as 'RAYLANE', got {name!r}")
    upper, transport = name.upper(), check_name(tensor_transport)
    # Ray's own table: in an actor, Ray may have registered the name itself.
    known = _ray.tensor_transport_class(upper)
    if known is not None:
        if issubclass(known, RaylaneTransport) and known.transport == transport:
            return
        raise ValueError(
            f"{upper!r} is the name of another tensor transport of Ray already ({known.__name__}"
            f"{f' for {known.transport}' if issubclass(known, RaylaneTransport) else ''}). Use another name"
        )
    manager: type = RaylaneTransport
    if (upper, transport) != (RaylaneTransport.name, RaylaneTransport.transport):
        # Ray creates the object without arguments, and pickles a class made here by value.
        manager = type("RaylaneTransport", (RaylaneTransport,), {"name": upper, "transport": transport})
    _ray.register_tensor_transport(upper, ["cpu", "cuda"], manager, torch.Tensor)
