"""Values of a graph as messages, and the operations on them. No channels, no Ray calls."""
