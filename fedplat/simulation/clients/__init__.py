"""Models of fleets: the speed, availability, failures and labels of clients."""

from fedplat.simulation.clients.availability import Availability
from fedplat.simulation.clients.fleet import Fleet, FleetOptions, Label, build_fleet

__all__ = ["Availability", "Fleet", "FleetOptions", "Label", "build_fleet"]
