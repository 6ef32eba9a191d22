"""Routing of calls to the leader: routes, gateways, a shared port."""
