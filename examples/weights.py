"""Move weights from a trainer of two ranks to a reader of another layout. Run `python examples/weights.py`."""

import ray
import torch

from raylane import weights


def model():
    return torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))


@ray.remote
class Rank:  # one of two ranks; each has half of the rows of every tensor
    def __init__(self, rank):
        torch.manual_seed(0)
        self.shards = {name: tensor.chunk(2)[rank].clone() for name, tensor in model().state_dict().items()}

        def place(name, tensor):
            return weights.Part.even(tensor, dim=0, rank=rank, size=2)

        self.publisher = weights.Publisher("policy", self.shards, rank=rank, world=2, places=place)

    def train(self, step):
        for tensor in self.shards.values():
            tensor.add_(1)  # a step of training
        return self.publisher.publish(step)


@ray.remote
class Engine:  # a whole model
    def __init__(self):
        self.model = model()
        self.subscriber = weights.Subscriber("policy", self.model, apply="swap")

    def update(self):
        update = self.subscriber.update(timeout=10)
        return f"version {update.version} of step {update.step}, {update.nbytes:,} bytes"


ranks, engine = [Rank.remote(rank) for rank in range(2)], Engine.remote()
for step in (10, 20):
    ray.get([rank.train.remote(step) for rank in ranks])
    print(ray.get(engine.update.remote()))
for rank in ranks:
    ray.kill(rank)
print(ray.get(Engine.remote().update.remote()))  # a version outlives its trainer
weights.drop("policy")
