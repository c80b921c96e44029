"""Published values in the process that holds them: memory, lifetimes, limits."""
