"""Configuration of a fine-tuning run: its schema, files, overrides and checks. No torch, no Ray."""
