"""Channels of a graph: rings and leased memory within a host, peer links between hosts."""
