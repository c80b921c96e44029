"""Benchmark of queues and of the loop of GRPO."""
