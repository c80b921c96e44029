"""Reads of published values: choice of a transport, fetch, delivery."""
