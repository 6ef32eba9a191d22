"""What a stopped run resumes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fedplat.aggregate import State
from fedplat.model import Parameters, Vector


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of a job after a commit, while no update is received or folded: a stopped run resumes from it.

    `models` are the latest version and those that clients in training began with; `step` is the size of the latest
    version's encoded step, if there is one. `state`, `scalars` and `memory` belong to the rule, `residuals` to the
    clients' codecs, and `client_states` are the client states.
    """

    version: int
    models: Mapping[int, Parameters]
    state: State
    scalars: Mapping[str, float]
    memory: bytes
    residuals: Mapping[int, Vector]
    client_states: Mapping[int, Mapping[str, Parameters]]
    step: float | None
