"""Sampling policies: they draw the cohort of an attempt from the eligible clients.

`candidates.py` defines the input of a policy. Each policy is a frozen options record (the table
`[selection.sampling]` of a job file) with a pure method `draw(candidates, count, rng)`. `docs/contributing.md` has the
steps to add one.

A policy that `remembers` uses the clients' history, which the coordinator keeps only for such policies. If `is_trial`
is true, each client is drawn by an independent trial when the selection ends, so the number of drawn clients is random
and determined by the policy. Both are false unless a policy overrides them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from fedplat.config import user_code
from fedplat.config.plugins import Kind, by_name, define, name_of
from fedplat.errors import PluginError
from fedplat.sampling.candidates import BasePolicy, Candidates, ClientHistory, Labels
from fedplat.sampling.policies import Oort, Poisson, Stratified, Uniform, Weighted


@runtime_checkable
class Policy(Protocol):
    """The table `[selection.sampling]` of a job file: the options of a policy, selected by the key `policy`."""

    is_trial: ClassVar[bool]

    @property
    def remembers(self) -> bool:
        """True if the policy uses the clients' history."""
        ...

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        """Return the indices of the drawn candidates, `count` of them unless the policy is a trial."""
        ...


POLICIES: Mapping[str, type[Policy]] = by_name(Uniform, Poisson, Weighted, Stratified, Oort)
"""The options record of each built-in policy, by its name in a job file."""

define(Kind("policies", "policy", "a sampling policy", Policy, ("draw",), POLICIES, BasePolicy))


def uses_history(policy: Policy) -> bool:
    """Return the policy's `remembers`. Raises `UserCodeError` if the policy of a plugin raises an error."""
    with user_code.wrap_errors(f'the sampling policy "{name_of(policy)}": remembers'):
        return bool(policy.remembers)


def draw(policy: Policy, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
    """Return the candidates that a policy draws.

    Raises `UserCodeError` if the policy of a plugin raises an error, `PluginError` if it draws impossible candidates.
    """
    if type(policy) in POLICIES.values():
        return policy.draw(candidates, count, rng)
    most = len(candidates) if policy.is_trial else min(count, len(candidates))
    with user_code.wrap_errors(f'the sampling policy "{name_of(policy)}": draw()'):
        some = itertools.islice(policy.draw(candidates, count, rng), most + 1)  # it may draw without end
        drawn = [operator.index(index) for index in some]
    if len(drawn) > most or len({*drawn}) < len(drawn) or any(not 0 <= index < len(candidates) for index in drawn):
        raise PluginError(
            f'the sampling policy "{name_of(policy)}" drew {str(drawn)[:100]} from {len(candidates)} candidates; '
            f"expected at most {most} different numbers from 0 to {len(candidates) - 1}"
        )
    return drawn


__all__ = [
    "POLICIES",
    "BasePolicy",
    "Candidates",
    "ClientHistory",
    "Labels",
    "Oort",
    "Poisson",
    "Policy",
    "Stratified",
    "Uniform",
    "Weighted",
    "draw",
    "uses_history",
]
