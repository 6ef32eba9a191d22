"""Trainers for well-known libraries, each an optional extra."""
