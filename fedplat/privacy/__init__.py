"""Differential privacy: mechanisms, what they release, and what that costs."""
