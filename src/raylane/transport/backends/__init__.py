"""One file per way to move bytes, behind the contract in `base`."""
