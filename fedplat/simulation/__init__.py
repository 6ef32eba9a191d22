"""Simulation: whole fleets in virtual time, on the coordinator that runs in production.

`ports` says what the parts are: an engine trains clients, and the driver asks it for updates when virtual time has come
to their reports.
"""
