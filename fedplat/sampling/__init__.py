"""Sampling policies: they draw the cohort of an attempt from the eligible clients.

`candidates.py` defines the input of a policy. Each policy is one file with a frozen options record (the table
`[selection.sampling]` of a job file) and its pure method `draw(candidates, count, rng)`. `docs/contributing.md` has the
steps to add one.

A policy also has two class variables. `remembers` is true if it uses the clients' history, which the coordinator keeps
only for such policies. `is_trial` is true if each client is drawn by an independent trial when the selection ends, so
that the number of drawn clients is random and determined by the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from fedplat.sampling.candidates import Candidates, ClientHistory, Labels
from fedplat.sampling.oort import Oort
from fedplat.sampling.poisson import Poisson
from fedplat.sampling.stratified import Stratified
from fedplat.sampling.uniform import Uniform
from fedplat.sampling.weighted import Weighted

Policy = Uniform | Poisson | Weighted | Stratified | Oort
"""The table `[selection.sampling]` of a job file: a union tagged by its key `policy`."""

POLICIES: Mapping[str, type[Policy]] = {each.__struct_config__.tag: each for each in get_args(Policy)}
"""The options record of each policy, by its name in a job file."""

__all__ = [
    "POLICIES",
    "Candidates",
    "ClientHistory",
    "Labels",
    "Oort",
    "Poisson",
    "Policy",
    "Stratified",
    "Uniform",
    "Weighted",
]
