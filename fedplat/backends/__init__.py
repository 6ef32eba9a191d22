"""Adapters to machine-learning frameworks; each needs its extra."""
