"""Searches for what is wrong in silence (README.md)."""
