"""Text, pictures, counters and traces of a graph. Pure."""
