"""Benchmark of steps of a worker group."""
