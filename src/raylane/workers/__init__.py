"""Worker groups: actors laid out on named axes, and the distribution of arguments among them."""
