"""Studies of single questions; the docstring of each says how to run it."""
