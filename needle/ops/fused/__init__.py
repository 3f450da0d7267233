"""Ops that stand for several; each carries its unfused form."""
