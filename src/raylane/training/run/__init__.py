"""The parts of a training run: step, worker, policy, and what the driver does around them."""
