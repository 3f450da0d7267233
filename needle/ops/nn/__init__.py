"""Layers: convolutions, pools, normalisations, attention, recurrence, losses."""
