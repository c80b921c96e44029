"""Counters, metrics and traces of transfers."""
