"""How a client proves who it is: tickets, signed requests, certificates."""
