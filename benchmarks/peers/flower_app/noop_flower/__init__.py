"""Rounds of Flower without training."""
