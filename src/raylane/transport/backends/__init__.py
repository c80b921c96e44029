"""Transports: one module for each way to move the bytes of a value."""
