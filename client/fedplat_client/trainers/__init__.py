"""Trainers for well-known libraries, each behind an extra; import the one that you need."""
