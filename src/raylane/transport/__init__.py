"""Direct tensor transport: tensors move from the producing process straight to the process that reads them."""
