"""Configurations of NeMo-RL, translated to raylane's. Nothing else in sft imports this package."""
