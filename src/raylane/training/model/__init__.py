"""Model and optimizer of a run: built, divided, and filled with weights."""
