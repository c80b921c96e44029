"""Registration of tensor transports that were written for Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from raylane import _ray
from raylane.errors import TransportUnavailableError
from raylane.transport.backends.base import AUTO
from raylane.transport.backends.ray_managers import registered
from raylane.transport.backends.ray_managers.backend import ManagedBackend
from raylane.transport.backends.registry import backends


def add_ray_transport(name: str, manager_class: Any, *, devices: Sequence[str] = ("cpu",)) -> None:
    """Make a tensor transport that was written for Ray available as `tensor_transport=name`, in the whole cluster.

    Call it once, in any process that is connected to Ray, before the name is used in `raylane.method`, `put` or `get`.
    The other processes find the class by themselves, so nothing has to be called there. A class that replaces an
    earlier one is used by processes that have not used the name yet.

    The manager moves flat uint8 tensors. With "cpu" among the devices, it is given the published memory itself, and
    target buffers in the reader. Otherwise the bytes are copied to the first device, and back in the reader.

    Args:
        name: Name of the transport, in lower case.
        manager_class: Subclass of `ray.experimental.TensorTransportManager`, created without arguments.
        devices: Device types of torch that the manager accepts, as for Ray's `register_tensor_transport`.
    """
    if not isinstance(manager_class, type) or not issubclass(manager_class, _ray.TensorTransportManager):
        raise TypeError(
            f"manager_class must be a subclass of ray.experimental.TensorTransportManager, got {manager_class!r}"
        )
    if not name or name != str(name).lower():
        raise ValueError(f"name must be a string in lower case such as 'hccl', got {name!r}")
    # A name that was registered before is free: the class may have changed in a notebook.
    present = backends().get(name)
    if name == AUTO or (present is not None and not isinstance(present, ManagedBackend)):
        raise ValueError(f"name={name!r} is a transport of raylane or of another package. Use another name")
    # A string is a sequence of letters, and "cpu" is an easy mistake for ["cpu"].
    if isinstance(devices, str) or not devices:
        raise ValueError(f"devices must be a list of device types such as ['cpu'], got {devices!r}")
    if not ray.is_initialized():
        raise TransportUnavailableError("the other processes find a transport through Ray. Call ray.init() before")
    registered.announce(name, manager_class, devices)
