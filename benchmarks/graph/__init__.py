"""Benchmark of calls through compiled graphs."""
