"""Benchmarks behind `raylane bench`: tensor transfer, compiled graphs, worker groups and weights.

`cli/bench.py` parses the command line, calls this package and writes the report.
"""
