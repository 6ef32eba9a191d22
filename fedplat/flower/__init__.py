"""Flower apps on fedplat: their ClientApps, ServerApps and strategies, unchanged.

This package alone imports `flwr`, and only its public modules. A server, a client and a simulation exchange the same
messages (`records.py`): `apps.py` answers them with a ClientApp, and runs a ServerApp, whose grid hands them to
fedplat, and `durable.py` makes the rounds of a strategy survive a crash.
"""
