"""Simulation: whole fleets in virtual time, on the coordinator that runs in production.

`simulate` runs a job in one call, from a file or from Python objects, and `compare` compares configurations. An engine
(`engines.interface`) trains the clients, and the driver fetches each update when virtual time reaches the client's
report.
"""

from __future__ import annotations

from fedplat.simulation.api import Run, compare, simulate
from fedplat.simulation.clients import FleetOptions
from fedplat.simulation.data import Dataset, Federation
from fedplat.simulation.report.comparison import Comparison
from fedplat.simulation.run_folder import RunFolderOptions
from fedplat.simulation.scenario.building import make_job
from fedplat.simulation.scenario.file import SimulationFile
from fedplat.simulation.scenario.options import SimulationOptions

__all__ = [
    "Comparison",
    "Dataset",
    "Federation",
    "FleetOptions",
    "Run",
    "RunFolderOptions",
    "SimulationFile",
    "SimulationOptions",
    "compare",
    "make_job",
    "simulate",
]
