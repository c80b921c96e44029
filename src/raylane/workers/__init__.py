"""Worker groups: actors on named axes, and what goes to whom."""
