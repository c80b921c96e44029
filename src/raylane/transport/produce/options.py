"""Options of publication, as accepted by `raylane.method` and `raylane.put`. Pure."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from raylane.transport.backends.base import AUTO
from raylane.transport.backends.registry import backends, check_name

ON_MUTATION = ("warn", "error", "allow")


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Checked options of one method or one put."""

    tensor_transport: str = AUTO
    """Name of the transport that readers use; `auto` lets each reader choose."""
    snapshot: bool = False
    """True to copy the tensors once into sealed shared memory, so that readers never see later writes."""
    on_mutation: str = "warn"
    """Reaction of a read that finds a tensor written to since publication: `warn`, `error` or `allow`."""

    @functools.cached_property  # asked at every publication
    def by_ray(self) -> bool:
        """True if Ray carries the tensors inside the result."""
        return self.tensor_transport != AUTO and backends()[self.tensor_transport].capability.by_ray

    @functools.cached_property
    def two_sided(self) -> bool:
        """True if readers outside the groups of the source get the value another way."""
        return self.tensor_transport != AUTO and backends()[self.tensor_transport].capability.two_sided


def publish_options(
    tensor_transport: str | None, alias: str | None, snapshot: bool, on_mutation: str, *, where: str
) -> PublishOptions:
    """Return the checked options. ValueError or TypeError names the argument, its value and the accepted values."""
    if alias is not None:
        if tensor_transport is not None and tensor_transport != alias:
            raise ValueError(
                f"{where} got tensor_transport={tensor_transport!r} and _tensor_transport={alias!r}: the second is "
                "another spelling of the first. Pass one of them"
            )
        tensor_transport = alias
    name = check_name(AUTO if tensor_transport is None else tensor_transport)
    if on_mutation not in ON_MUTATION:
        raise ValueError(f"{where}: on_mutation must be one of {', '.join(ON_MUTATION)}, got {on_mutation!r}")
    if not isinstance(snapshot, bool):
        raise TypeError(f"{where}: snapshot must be True or False, got {snapshot!r}")
    if snapshot and name != AUTO and not backends()[name].capability.snapshots:
        raise ValueError(
            f"{where}: snapshot=True keeps the value in shared memory, which tensor_transport={name!r} does not use. "
            "Use tensor_transport='auto' or 'host', or omit snapshot"
        )
    return PublishOptions(tensor_transport=name, snapshot=snapshot, on_mutation=on_mutation)
