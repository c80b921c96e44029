"""Pass samples from producers to a consumer through a queue. Run `python examples/rollout_queue.py`."""

import asyncio

import ray
import torch

from raylane.rl import TrajectoryQueue


@ray.remote
class Producer:
    def run(self, queue, prompts):
        for prompt in prompts:
            for _ in range(4):
                sample = {"prompt": prompt, "tokens": torch.randint(100, (8,))}
                queue.put(sample, group=prompt, versions=[(7, 8)])  # 8 tokens, made by version 7 of the weights
        queue.flush()


async def consume(queue):
    async for batch in queue.batches(2):  # two prompts at a time, with all samples of each
        for group in batch.groups:
            print(f"prompt {group[0]['prompt']}: {len(group)} samples of {len(group[0]['tokens'])} tokens")


ray.init()
queue = TrajectoryQueue(group_size=4, max_bytes=1 << 28, max_lag=2)
queue.set_version(8)
producers = [Producer.remote() for _ in range(2)]
ray.get([producer.run.remote(queue, [2 * i, 2 * i + 1]) for i, producer in enumerate(producers)])
queue.close()
asyncio.run(consume(queue))
print(f"tokens by version: {queue.stats().tokens}")
