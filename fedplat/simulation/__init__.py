"""Simulation: whole fleets in virtual time, on the coordinator that runs in production.

`simulate` is the call of one line. `ports` says what the parts are: an engine trains clients, and the driver asks it
for updates when virtual time has come to their reports.
"""

from __future__ import annotations

from fedplat.simulation.api import Run, simulate
from fedplat.simulation.data import Dataset, Federation
from fedplat.simulation.run_folder import RunFolderOptions
from fedplat.simulation.scenario.file import SimulationFile

__all__ = ["Dataset", "Federation", "Run", "RunFolderOptions", "SimulationFile", "simulate"]
