import ray
import torch

import raylane


@ray.remote
class Producer:
    @raylane.method  # the only change to the Ray program
    def activations(self, rows):
        return torch.ones(rows, 1000)


@ray.remote
class Consumer:  # an ordinary actor
    def total(self, tensor):
        return float(tensor.sum())


producer, consumer = Producer.remote(), Consumer.remote()
ref = producer.activations.remote(1000)  # an ordinary ObjectRef
print(ray.get(consumer.total.remote(ref)))  # read from the producer
