"""Captures of torch models, and their graphs run through the rules."""
