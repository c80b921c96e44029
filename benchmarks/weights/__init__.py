"""Benchmark of weights in versions."""
