"""The actors of a job and of its hosts, and calls of them."""
