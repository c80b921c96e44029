"""Transfer by tensor transports that were written for Ray."""
