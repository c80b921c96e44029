"""First steps, part 2: the actors of hello.py, with the counters of each process after one transfer.

Run with `python examples/first_stats.py`; no GPU is needed.
"""

import ray
import torch

import raylane


@ray.remote
class Producer:
    @raylane.method
    def activations(self, rows):
        return torch.ones(rows, 1000)

    def counters(self):
        return raylane.stats()


@ray.remote
class Consumer:
    def total(self, tensor):
        return float(tensor.sum())

    def counters(self):
        return raylane.stats()


producer, consumer = Producer.remote(), Consumer.remote()
ref = producer.activations.remote(1000)
print("total:", ray.get(consumer.total.remote(ref)))
print(ray.get(producer.counters.remote()))
print(ray.get(consumer.counters.remote()))
