"""An engine that trains clients on the machines of a Ray cluster."""
