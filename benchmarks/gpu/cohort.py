"""Rounds a second of simulated training on one device: fedplat's vmap, a plain PyTorch loop and pfl-research."""

from __future__ import annotations

from collections.abc import Iterator

import simulation_peers
from gpu.lines import Line, Measurement, Problem, Setting
from processes import FailedError, NotInstalledError

NAME = "cohort"
SYSTEMS = ("fedplat vmap", "pfl-research", "plain PyTorch")
"""The loop of fedplat computes on the CPU."""


def measure(setting: Setting) -> Iterator[Line]:
    """Measure each system for some seconds after its first round."""
    [logistic] = (case for case in simulation_peers.CASES if case.model == "LR")
    device = simulation_peers.Device(setting.device.type)
    for case in [logistic] if setting.is_small else [simulation_peers.CIFAR, logistic]:
        for system in SYSTEMS:
            try:
                sample = simulation_peers.measure(case, system, device, 0.5 if setting.is_small else 7.0)
            except (FailedError, NotInstalledError) as exc:
                is_failure = not isinstance(exc, NotInstalledError)
                yield Problem(part=NAME, text=f"{case.name}, {system}: {exc}", is_failure=is_failure)
                continue
            rate = len(sample.later) / sum(sample.later)
            yield Measurement(part=NAME, work=case.name, system=system, value=rate, unit="rounds/s")
