"""Shipped test tools: contract suites, fault injection and leak checks for programs that use raylane."""
