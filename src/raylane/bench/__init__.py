"""Benchmarks behind `raylane bench`: tensor transfer and compiled graphs, each against stock Ray.

`cli/bench.py` parses the command line, calls this package and writes the report.
"""
