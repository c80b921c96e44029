"""Configuration that every training shares: its sections, files, overrides and checks. No torch, no Ray."""
