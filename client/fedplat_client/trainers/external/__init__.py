"""Trainers outside of the client's process: programs in any language, containers and jobs of Slurm.

Each works on a task folder (`folder.py`, docs/task-folder.md). What starts, polls and stops it is one object for each
kind (`kinds.py`), and one loop drives them all (`trainer.py`).
"""

from __future__ import annotations

from fedplat_client.trainers.external.folder import TaskFolder
from fedplat_client.trainers.external.kinds import KINDS, ExternalOptions, make_launcher
from fedplat_client.trainers.external.launcher import Launcher, OuterProcess
from fedplat_client.trainers.external.root import TaskRoot
from fedplat_client.trainers.external.trainer import ExternalTrainer

__all__ = [
    "KINDS",
    "ExternalOptions",
    "ExternalTrainer",
    "Launcher",
    "OuterProcess",
    "TaskFolder",
    "TaskRoot",
    "make_launcher",
]
