"""Federated training in a simulation: clients' updates, aggregated by the server's rules."""
