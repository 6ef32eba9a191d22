"""Federated training in a simulation: clients' updates through the rules of the server."""
