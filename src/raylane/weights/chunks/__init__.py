"""Chunks, in which a version comes to other hosts: who sends which to whom, whole or as a patch."""
