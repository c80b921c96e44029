"""Layouts as values: boxes of ranks and where they are stored, plans of readers, other names and shapes."""
