"""Places of workers: a placement group with a bundle for each rank, or each node, and the groups that share it.

    first group     Places(options, size)   ->   its workers take their share of each bundle
    second group    places.join(needs)      ->   its rank i takes a part of what is reserved in the bundle of rank i
    each group      leave(share)                 the last one removes the placement group

For Ray the first group's actors take all GPUs of a bundle and the others none: of several GPUs in a bundle, Ray would
give two ranks the same one where both fit. CUDA_VISIBLE_DEVICES shows each worker its own. `group` creates the actors.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import WorkerGroupError
from raylane.workers.host import Seat
from raylane.workers.options import WorkerOptions

_ROUNDING = 1e-6
"""Largest difference of sums of shares that means nothing; Ray counts ten-thousandths."""


@dataclass(eq=False)
class Share:
    """Part of a bundle that each worker of one group takes."""

    needs: Mapping[str, float]
    first_gpu: float
    """Place where its GPUs begin among those of the bundle: 1.5 is the middle of the second one."""


class Places:
    """Bundles of the ranks of all groups that share a placement group."""

    def __init__(self, options: WorkerOptions, size: int, deadline: Deadline) -> None:
        """Wait until the cluster has room. WorkerGroupError if it has not before the deadline, or can never have."""
        bundles, strategy = options.bundles(size)
        needed = options.bundle()
        if _ray.started_here() and (total := ray.cluster_resources()):
            there = _amounts(total, needed)
            if any(there[name] < amount * size for name, amount in needed.items()):
                raise WorkerGroupError(
                    f"{size} workers of {needed} need more than this Ray has: {there}. It was started by this "
                    "process and does not grow. Ask for fewer resources, or start a larger cluster"
                )
        self._size, self._bundle = size, needed
        self.first_share = Share(options.needs(), 0.0)
        """Share of the first group."""
        self._shares = [self.first_share]
        self._is_divided = bool(options.reserve)
        self._devices: list[tuple[int, ...]] = []
        """GPUs of the first group's ranks, when they are known."""
        self.placement: PlacementGroup = placement_group(bundles, strategy=strategy)
        """Ray's placement group."""
        workers = f"{size} workers of {needed} ({len(bundles)} bundles, {strategy})"

        def room() -> str:
            free, total = ray.available_resources(), ray.cluster_resources()
            return f"Free now: {_amounts(free, needed)}, total: {_amounts(total, needed)}"

        try:
            waits = deadline.rounds(lambda: f"{workers} not placed. {room()}")
            if not any(self.placement.wait(wait_s) for wait_s in waits):
                raise WorkerGroupError(
                    f"the cluster could not place {workers} within {deadline.timeout_s} s. {room()}. Add nodes, or ask "
                    "for fewer resources"
                )
            self.indices = bundles_of_ranks(self.placement, size)
            """Index of the bundle of each rank."""
        except BaseException:
            remove_placement_group(self.placement)
            raise

    @property
    def is_shared(self) -> bool:
        """True if several groups have workers here."""
        return len(self._shares) > 1

    def join(self, needs: Mapping[str, float], size: int) -> Share:
        """Let each worker of another group sit beside the worker of its rank. ValueError if there is no room."""
        if size != self._size:
            raise ValueError(f"colocate: the groups must have as many workers, got {size} beside {self._size}")
        share = fitting_share(needs, self._bundle, self._shares)
        if share is None:
            taken = [dict(other.needs) for other in self._shares]
            raise ValueError(
                f"colocate: a worker needs {dict(needs)}, and of {self._bundle} for each rank {taken} is taken. Start "
                f"the other group with WorkerOptions(reserve={dict(needs)}), or more for further groups"
            )
        self._shares.append(share)
        return share

    def settle(self, seats: Sequence[Seat], *, named: bool) -> list[int]:
        """Return the indices of the processes of a group by rank, when they have started.

        In the first group the devices of a node ascend; with names, and beside another group, processes stay.
        """
        order = list(range(len(seats)))
        if not self._devices:
            order = order if named else order_by_devices(seats)
            self.indices = [self.indices[index] for index in order]
            self._devices = [seats[index].devices for index in order]
        return order

    def variables(self, share: Share) -> list[dict[str, str]]:
        """Return the environment variables by rank that make a group see its GPUs, where groups share them."""
        if not self._is_divided:
            return [{} for _ in self._devices]
        seen = slice(math.floor(share.first_gpu), math.ceil(share.first_gpu + share.needs.get("GPU", 0.0) - _ROUNDING))
        return [{"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices[seen]))} for devices in self._devices]

    def leave(self, share: Share) -> PlacementGroup | None:
        """End the use by a group. The last one removes the placement group, which is returned then."""
        self._shares.remove(share)
        if self._shares:
            return None
        remove_placement_group(self.placement)
        return self.placement


def fitting_share(needs: Mapping[str, float], bundle: Mapping[str, float], others: Sequence[Share]) -> Share | None:
    """Return a share of a bundle beside others, None if there is no room. A part of a GPU lies in one GPU."""
    for name, amount in needs.items():
        if sum(other.needs.get(name, 0.0) for other in others) + amount > bundle.get(name, 0.0) + _ROUNDING:
            return None
    gpus, total = needs.get("GPU", 0.0), bundle.get("GPU", 0.0)
    taken = [(other.first_gpu, other.first_gpu + other.needs.get("GPU", 0.0)) for other in others]
    for first in sorted({0.0, *(end for _, end in taken), *map(float, range(math.ceil(total)))}):
        last = first + gpus - _ROUNDING
        whole = math.floor(first) == math.floor(last) if gpus < 1 else first == math.floor(first)
        free = all(last <= start or end <= first + _ROUNDING for start, end in taken)
        if not gpus or (whole and free and last <= total):
            return Share(dict(needs), first if gpus else 0.0)
    return None


def order_by_devices(seats: Sequence[Seat]) -> list[int]:
    """Return the indices of `seats` in an order in which the devices of each node ascend; each keeps its node's places.

    Ray gives the GPUs of a node to actors in the order in which their processes happen to start.
    """
    order = list(range(len(seats)))
    for node in {seat.node_id for seat in seats}:
        places = [index for index, seat in enumerate(seats) if seat.node_id == node]
        ordered = sorted(places, key=lambda index: (seats[index].devices, index))
        for place, index in zip(places, ordered, strict=True):
            order[place] = index
    return order


def bundles_of_ranks(placement: PlacementGroup, size: int) -> list[int]:
    """Return the index of each rank's bundle, chosen so that ranks on one node are consecutive.

    Ray numbers bundles without regard to nodes. If ranks alternated between nodes, neighbours on a mesh axis would
    exchange all their data over the network.
    """
    nodes: dict[int, str] = placement_group_table(placement)["bundles_to_node_id"]
    first = {node: min(index for index, other in nodes.items() if other == node) for node in nodes.values()}
    ordered = sorted(nodes, key=lambda index: (first[nodes[index]], index))
    each = size // len(ordered)
    return [index for index in ordered for _ in range(each)]


def rank_variables(seats: Sequence[Seat]) -> list[dict[str, str]]:
    """Return the environment variables of each rank; nodes are numbered in the order of their first rank."""
    nodes = list(dict.fromkeys(seat.node_id for seat in seats))
    local: dict[str, list[int]] = {node: [] for node in nodes}
    for rank, seat in enumerate(seats):
        local[seat.node_id].append(rank)
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(seats)),
            "LOCAL_RANK": str(local[seat.node_id].index(rank)),
            "LOCAL_WORLD_SIZE": str(len(local[seat.node_id])),
            "NODE_RANK": str(nodes.index(seat.node_id)),
            "MASTER_ADDR": seats[0].address,
            "MASTER_PORT": str(seats[0].store_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for rank, seat in enumerate(seats)
    ]


def release(places: Places, share: Share) -> None:
    """Leave the places of a WorkerGroup that was dropped without `shutdown`; runs as a finalizer."""
    warnings.warn("a WorkerGroup was dropped without shutdown()", ResourceWarning, stacklevel=2)

    def remove() -> None:
        with suppress(Exception):  # the Ray session may have ended meanwhile
            places.leave(share)

    # On a thread: the garbage collector may run this anywhere, even inside a call to Ray, and removing calls Ray.
    threading.Thread(target=remove, name="raylane-release", daemon=True).start()


def _amounts(resources: Mapping[str, float], needed: Iterable[str]) -> dict[str, float]:
    """Return the amounts of the needed resources."""
    return {name: resources.get(name, 0.0) for name in needed}
