"""Memory that other processes may read: how it is made, named, mapped, lent and used again. Nothing else makes any."""
