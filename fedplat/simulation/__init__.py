"""Simulation: whole fleets in virtual time, on the coordinator that runs in production.

`simulate` runs a job in one call. An engine (`engines.interface`) trains the clients, and the driver fetches each
update when virtual time reaches the client's report.
"""

from __future__ import annotations

from fedplat.simulation.api import Run, simulate
from fedplat.simulation.data import Dataset, Federation
from fedplat.simulation.run_folder import RunFolderOptions
from fedplat.simulation.scenario.file import SimulationFile

__all__ = ["Dataset", "Federation", "Run", "RunFolderOptions", "SimulationFile", "simulate"]
