"""Procedures: exact sums of what sites reply, from integers with declared bounds and steps (`sums.py`)."""
