"""Sampling policies: whom an attempt draws from those who may take part.

`candidates.py` says what a policy is told; each policy is one file with a frozen options record (the table
`[selection.sampling]` of a job file) and its pure `draw(candidates, count, rng)`. To add one: write one new file (the
paper in its docstring), add its record to `Policy` below, and one row to the table of
`tests/core/sampling/test_contract.py`.

A policy has two class variables besides. `remembers`: whether it asks what earlier rounds told of clients, which the
coordinator keeps only for policies that do. `is_trial`: whether each client is drawn by a trial of its own when the
selection ends, so that the number drawn is random and the policy's own.
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
"""The table `[selection.sampling]` of a job file: a union that its key `policy` tells apart."""

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
