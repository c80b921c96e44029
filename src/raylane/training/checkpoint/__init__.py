"""Checkpoints and Hugging Face folders: written, completed, read and exported."""
