"""Transfer over TCP, shared by the readers of one host."""
