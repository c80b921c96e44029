"""Signals between processes of a host: semaphores, eventfds, and how long to wait before sleeping."""
