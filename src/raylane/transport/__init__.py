"""Direct transport: tensors go from the process that made them to the process that needs them."""
