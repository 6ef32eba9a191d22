"""The way of a call to the daemon that leads: routes, gateways, a shared port."""
