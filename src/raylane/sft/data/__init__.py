"""Conversations to rows: files read, tokenised, cached, packed and ordered."""
