"""Authenticated connections between processes, and the process's end of them."""
