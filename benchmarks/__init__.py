"""Studies of raylane that are not part of the wheel: run them from a checkout."""
