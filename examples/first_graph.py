"""First steps, part 3: the same two actors, called through a compiled graph.

Run with `python examples/first_graph.py`; no GPU is needed.
"""

import time

import ray
import torch

import raylane


@ray.remote
class Producer:
    def activations(self, rows):
        return torch.ones(rows, 1000)


@ray.remote
class Consumer:
    def total(self, tensor):
        return float(tensor.sum())


producer, consumer = Producer.remote(), Consumer.remote()

with raylane.InputNode() as rows:  # stands for the argument of execute
    tensor = raylane.bind(producer.activations, rows)  # describes a call; nothing runs yet
    total = raylane.bind(consumer.total, tensor)

graph = raylane.compile(total)
print(graph.show())
print(graph.execute(1000).get())


def microseconds(call):
    """Return the mean time of 200 calls."""
    started = time.perf_counter()
    for _ in range(200):
        call()
    return (time.perf_counter() - started) / 200 * 1e6


print(f"Ray calls:      {microseconds(lambda: ray.get(consumer.total.remote(producer.activations.remote(1)))):.0f} us")
print(f"compiled graph: {microseconds(lambda: graph.execute(1).get()):.0f} us")

results = [graph.execute(rows) for rows in (1, 2)]  # two executions in flight
print([result.get() for result in results])
graph.teardown()
