"""Experiment trackers: the rounds of a job or a simulation as metrics in MLflow or TensorBoard."""

from fedplat.trackers.backends import MlflowTracker, TensorBoardTracker
from fedplat.trackers.tracker import (
    BackgroundTracker,
    RoundMetrics,
    RunStatus,
    TrackedRun,
    Tracker,
    describe_rounds,
    flatten,
)

__all__ = [
    "BackgroundTracker",
    "MlflowTracker",
    "RoundMetrics",
    "RunStatus",
    "TensorBoardTracker",
    "TrackedRun",
    "Tracker",
    "describe_rounds",
    "flatten",
]
