"""Values of labels that have a meaning of their own. Used wherever tokens with a loss are told from others."""

IGNORED = -100
"""Label of a position without a loss (`ignore_index` of torch.nn.functional.cross_entropy)."""
