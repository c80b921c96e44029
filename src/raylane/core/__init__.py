"""Values, clocks and shared memory of one host. Imports neither Ray nor torch nor other packages of raylane."""
