"""Secure aggregation in a simulation: its groups, its steps in virtual time, its costs, and the protocol itself."""
