"""Direct transport: tensors from actor to actor without Ray's object store in between.

Run with `python examples/direct_transport.py`; no GPU is needed.
"""

from __future__ import annotations

import ray
import torch

import raylane


@ray.remote
class Producer:
    @raylane.method
    def random_tensor(self) -> torch.Tensor:
        return torch.randn(1000, 1000)

    @raylane.method
    def random_tensor_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor1": torch.randn(1000, 1000), "tensor2": torch.randn(1000, 1000)}

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sum()

    def produce(self, tensors: list[torch.Tensor]) -> list[ray.ObjectRef]:
        return [raylane.put(tensor) for tensor in tensors]


@ray.remote
class Consumer:
    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sum()

    def sum_dict(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["tensor1"].sum() + tensors["tensor2"].sum()

    def consume(self, refs: list[ray.ObjectRef]) -> float:
        return sum(float(tensor.sum()) for tensor in raylane.get(refs, timeout=60))


def main() -> None:
    producer, consumer = Producer.remote(), Consumer.remote()

    ref = producer.random_tensor.remote()  # the tensor stays in the producer; `ref` is an ordinary ObjectRef
    print("summed by the consumer:", float(ray.get(consumer.sum.remote(ref))))
    print("summed by the driver:  ", float(ray.get(ref).sum()))

    tensors = producer.random_tensor_dict.remote()
    print("a dict of tensors:     ", float(ray.get(consumer.sum_dict.remote(tensors))))
    print("one of them:           ", tuple(raylane.get(tensors)["tensor2"].shape))

    # The producer gets back the same tensor object; nothing is copied. raylane warns, because a write by the producer
    # may now change the value that other readers get.
    same, copied = ray.get([producer.sum.remote(ref), consumer.sum.remote(ref)])
    assert torch.allclose(same, copied)

    refs = producer.produce.remote([torch.ones(1000, 1000), torch.ones(1000, 1000)])
    print("put by an actor:       ", ray.get(consumer.consume.remote(refs)))
    print("through Ray's store:   ", float(raylane.get(ref, tensor_transport="object_store").sum()))


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    main()
