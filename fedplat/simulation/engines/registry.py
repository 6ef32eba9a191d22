"""The engines, by their names in the key `simulation.engine` of a simulation file.

PyTorch is imported only when an engine is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from fedplat import errors, learner, system
from fedplat.config.plugins import Kind, build_checked, by_name, define, is_builtin
from fedplat.simulation.engines import interface
from fedplat.simulation.engines.interface import Engine

if TYPE_CHECKING:
    from fedplat.simulation.engines.tasks import ClientTraining


@runtime_checkable
class EngineOptions(Protocol):
    """The key `simulation.engine`: the options of an engine, selected by the key `name`, or only its name."""

    def build(self, task: ClientTraining, num_workers: int) -> Engine:
        """Create the engine; it has `num_workers` processes (0: as many as are useful), if it has any."""
        ...


class AutoOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="auto"):
    """The fastest of the engines, as measured in the first rounds."""

    def build(self, task: ClientTraining, num_workers: int) -> Engine:
        """Create the engine."""
        from fedplat.simulation.engines.auto import AutoEngine

        return AutoEngine(task, num_workers or system.num_cores())


class LoopOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="loop"):
    """One client after the other, in this process."""

    def build(self, task: ClientTraining, num_workers: int) -> Engine:
        """Create the engine."""
        from fedplat.simulation.engines.processes import LoopEngine

        return LoopEngine(task)


class ProcessesOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="processes"):
    """Worker processes on this machine."""

    def build(self, task: ClientTraining, num_workers: int) -> Engine:
        """Create the engine."""
        from fedplat.simulation.engines.processes import ProcessEngine

        return ProcessEngine(task, num_workers)


class RayOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="ray"):
    """Actors of a Ray cluster."""

    def build(self, task: ClientTraining, num_workers: int) -> Engine:
        """Create the engine. Raises `MissingExtraError` without Ray."""
        from fedplat.simulation.engines.ray import RayEngine

        return RayEngine(task, num_workers)


class VmapOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="vmap"):
    """Many clients in each operation."""

    def build(self, task: ClientTraining, num_workers: int) -> Engine:
        """Create the engine. Raises `UnsuitableEngineError` for a learner that is not a PyTorch module."""
        if isinstance(task.learner, learner.ArrayLearner):
            raise errors.UnsuitableEngineError(
                'engine = "vmap": the learner is not a PyTorch module; use "loop" or "processes"'
            )
        from fedplat.simulation.engines.client_trainer import VmapEngine

        return VmapEngine(task)


ENGINES: Mapping[str, type[EngineOptions]] = by_name(
    AutoOptions, LoopOptions, ProcessesOptions, RayOptions, VmapOptions
)
"""The options record of each built-in engine, by its name in a simulation file."""

define(Kind("engines", "name", "a training engine", EngineOptions, ("build",), ENGINES, plain=True))


def open_engine(options: EngineOptions, task: ClientTraining, num_workers: int = 0) -> Engine:
    """Create an engine, which the caller closes; it has `num_workers` processes, unless it trains in this one.

    `num_workers` = 0 stands for one process for each core; with `ray`, for each core of the cluster. Also makes this
    process keep freed memory for later tensors (`keep_freed_memory`). Raises `EngineError` for a task that the engine
    does not support, `MissingExtraError` if a package is not installed, and `PluginError` or `UserCodeError` for a
    plugin that builds no engine.
    """
    interface.keep_freed_memory()
    if is_builtin(options, EngineOptions):
        return options.build(task, num_workers)
    return build_checked(options, Engine, "simulation.engine", task, num_workers)
