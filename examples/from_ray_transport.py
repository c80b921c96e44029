"""A program written for Ray's direct transport, run by raylane. Changed lines name the lines that they replace.

Run with `python examples/from_ray_transport.py`; no GPU is needed.
"""

from __future__ import annotations

import ray
import torch

import raylane


@ray.remote(num_cpus=0)  # was: ray.remote(num_cpus=0, enable_tensor_transport=True)
class Trainer:
    def __init__(self) -> None:
        self.weight = torch.ones(1000, 1000)

    @raylane.method  # was: @ray.method(tensor_transport="gloo")
    def state(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def publish(self) -> list[ray.ObjectRef]:
        return [raylane.put(self.weight)]  # was: ray.put(self.weight, _tensor_transport="nixl")

    def step(self) -> float:
        raylane.wait_tensor_freed(self.weight, timeout=60)  # was: ray.experimental.wait_tensor_freed
        self.weight += 1
        return float(self.weight.sum())


@ray.remote(num_cpus=0)
class Reader:
    """An ordinary actor: the same for Ray's direct transport and for raylane's."""

    def total(self, state: dict[str, torch.Tensor]) -> float:
        return float(state["weight"].sum())

    def total_of_ref(self, refs: list[ray.ObjectRef]) -> float:
        return float(ray.get(refs[0]).sum())


def main() -> None:
    trainer, reader = Trainer.remote(), Reader.remote()
    # was: create_collective_group([trainer, reader], backend="gloo")
    state = trainer.state.remote()
    print("actor:", ray.get(reader.total.remote(state)))
    print("driver:", float(ray.get(state)["weight"].sum()))  # was: ray.get(state, _use_object_store=True)
    target = torch.zeros(1000, 1000)
    raylane.get(state, into=[target])  # was: set_target_for_ref(state, [target]), then ray.get(state)
    print("into a tensor:", float(target.sum()))
    refs = ray.get(trainer.publish.remote())
    print("put:", ray.get(reader.total_of_ref.remote(refs)))
    del state, refs  # `step` waits until the last ref is gone
    print("after a step:", ray.get(trainer.step.remote()))


if __name__ == "__main__":
    main()
