"""Verify weights, evaluate one version, switch two engines as one, go back. Run `python examples/weights_fleet.py`."""

import ray
import torch

from raylane import weights


@ray.remote(max_concurrency=2)  # a thread that waits for requests, and one that answers
class Engine:
    def __init__(self):
        self.weight = torch.zeros(1000)
        subscriber = weights.Subscriber("policy", {"weight": self.weight}, apply="swap", verify="each")
        self.reader = weights.FleetReader([subscriber])

    def serve(self):
        while True:
            self.reader.idle(1)  # waits for requests, and switches meanwhile

    def answer(self):
        versions = self.reader.step()
        return f"{self.weight.mean().item():.0f} with version {versions['policy']}"


ray.init()
trained = {"weight": torch.zeros(1000)}
publisher = weights.Publisher("policy", trained, digests=True)
engines = [Engine.remote() for _ in range(2)]
for engine in engines:
    engine.serve.remote()
for step in range(1, 6):
    trained["weight"].fill_(10 * step)  # a step of training
    publisher.publish(step)
    if step == 1:
        publisher.hold(1)  # the best so far
evaluated = {"weight": torch.zeros(1000)}
subscriber = weights.Subscriber("policy", evaluated)
print("evaluated:", subscriber.update(version=1).step, evaluated["weight"].mean().item())
print("verified: version", subscriber.verify())
fleet = weights.Fleet("policy")
fleet.switch(1, readers=2)
for change in (lambda: fleet.switch(5), fleet.rollback):
    print(change(), ray.get([engine.answer.remote() for engine in engines]))
weights.drop("policy")
