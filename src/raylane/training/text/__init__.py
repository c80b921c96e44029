"""Conversations as text and tokens, for all kinds of training."""
