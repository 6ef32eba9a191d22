"""Models of fleets: how fast clients are, when they are there, how often they fail, what they say of themselves."""

from fedplat.simulation.fleet.availability import Availability
from fedplat.simulation.fleet.fleet import Fleet, Label, build_fleet
from fedplat.simulation.fleet.options import FleetOptions

__all__ = ["Availability", "Fleet", "FleetOptions", "Label", "build_fleet"]
