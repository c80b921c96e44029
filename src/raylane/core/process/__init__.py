"""Processes of this host: who they are, when they end, what one reads of another; and the life of this one."""
