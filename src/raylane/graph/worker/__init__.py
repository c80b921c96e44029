"""The actor side of a running graph: the loop, its sessions and their executors."""
