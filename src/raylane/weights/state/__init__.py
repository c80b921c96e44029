"""State of a name: starts of its trainer, versions, readers. Pure: the decisions of the catalogue."""
