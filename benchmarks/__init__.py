"""Benchmarks of raylane against stock Ray and others (`python -m benchmarks NAME`), and studies beside them.

Not part of the wheel: run them from a checkout.
"""
