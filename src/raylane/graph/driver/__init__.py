"""The driver side of a running graph: deploy, submit, collect, results."""
