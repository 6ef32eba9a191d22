"""Models of fleets: how fast clients are, when they are there, how often they fail, what they say of themselves."""

from fedplat.simulation.clients.availability import Availability
from fedplat.simulation.clients.fleet import Fleet, Label, build_fleet
from fedplat.simulation.clients.options import FleetOptions

__all__ = ["Availability", "Fleet", "FleetOptions", "Label", "build_fleet"]
