"""Benchmark of tensor transfer."""
