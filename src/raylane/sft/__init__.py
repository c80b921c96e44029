"""Supervised fine-tuning on worker groups."""
