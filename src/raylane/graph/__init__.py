"""Compiled graphs: a fixed pattern of actor calls, planned once and run in microseconds (docs/reference/graphs.md)."""

from raylane.graph.collectives import allgather, allreduce, reducescatter
from raylane.graph.driver.result import wait
from raylane.graph.nodes import first, gather, mean, scatter

__all__ = ["allgather", "allreduce", "first", "gather", "mean", "reducescatter", "scatter", "wait"]
