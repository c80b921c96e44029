"""The training run: workers, policy, trainer, and the plan of a run before it starts."""
