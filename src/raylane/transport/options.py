"""How a value is published: what `raylane.method` and `raylane.put` take. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from raylane.transport.backends.registry import check_name

ON_MUTATION = ("warn", "error", "allow")


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    tensor_transport: str = "auto"
    snapshot: bool = False
    """Copy once into sealed shared memory at publication: later writes by the producer are never seen."""
    on_mutation: str = "warn"
    """What a read does that finds a tensor written to since publication."""


def publish_options(
    tensor_transport: str | None, alias: str | None, snapshot: bool, on_mutation: str, *, where: str
) -> PublishOptions:
    """Checked options. ValueError or TypeError names the argument, its value and what would do."""
    if alias is not None:
        if tensor_transport is not None and tensor_transport != alias:
            raise ValueError(
                f"{where} got tensor_transport={tensor_transport!r} and _tensor_transport={alias!r}: the second is "
                "another spelling of the first, pass one"
            )
        tensor_transport = alias
    name = check_name("auto" if tensor_transport is None else tensor_transport)
    if on_mutation not in ON_MUTATION:
        raise ValueError(f"{where}: on_mutation={on_mutation!r} must be one of {', '.join(ON_MUTATION)}")
    if not isinstance(snapshot, bool):
        raise TypeError(f"{where}: snapshot={snapshot!r} must be True or False")
    if snapshot and name not in ("auto", "host"):
        raise ValueError(
            f"{where}: snapshot=True keeps the value in shared memory, which tensor_transport={name!r} does not use; "
            "take auto or host, or drop snapshot"
        )
    return PublishOptions(tensor_transport=name, snapshot=snapshot, on_mutation=on_mutation)
