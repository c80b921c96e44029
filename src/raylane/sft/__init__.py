"""Supervised fine-tuning of language models on worker groups."""
