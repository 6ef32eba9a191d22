"""The claimed noise multiplier, measured on sums to which each client has added its part of the noise.

The noise comes from the operating system, so every run of these tests measures anew. The standard error of a measured
multiplier is about 0.5 % (the noise: 25 runs of 5 cohorts and 200 entries; the mean: multiplier x (2 / runs)^(1/2)). So
the tolerance, -3 % and +5 %, is about six standard errors wide on the narrower side.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from fedplat.aggregate import Contribution
from fedplat.job import JobSpec, build_secure_rule, find_mechanism_of, parse_job, secure
from fedplat.model import VectorBlocks
from fedplat.secure_aggregation.encoding import decode, encode
from fedplat.secure_aggregation.setup import Encoding
from support.audit import CLIP, SENT, Audit, Reports, Values, audit

SIZE = 200
GOAL = 20
MULTIPLIER = 0.01
RUNS = 25
LOWEST, HIGHEST = 0.97, 1.05
OTHERS = tuple(f"client {number}" for number in range(GOAL - 1))


def job(modulus: int = 32, bits: int = 20, metrics: str = "") -> JobSpec:
    return parse_job(
        f'name = "audited"\npopulation = "p"\ntrainer = "t"\nrounds = 1\n[model]\ninitial = "m.safetensors"\n'
        f"[selection]\ngoal = {GOAL}\nmin_fraction = 0.7\n[updates]\nmax_examples = 50\nclip_norm = {CLIP}\n"
        f"[secure_aggregation]\nmodulus = {modulus}\nbits = {bits}\n"
        f'[privacy]\ntrust = "none"\nparticipation = "fixed"\ndelta = 1e-5\nnoise_multiplier = {MULTIPLIER}\n{metrics}'
    )


class Sums:
    """What a server makes of the sums of a job's encoded updates."""

    def __init__(self, spec: JobSpec, encoding: Encoding) -> None:
        self._spec, self._encoding = spec, encoding
        self._rng = np.random.default_rng(1)
        self._updates = {name: self._update(1.0, 0.02) for name in OTHERS}
        self._updates |= {name: self._update(multiple, 0.0) for name, multiple in SENT.items()}

    def _update(self, multiple: float, spread: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        update = (spread * CLIP * self._rng.normal(size=SIZE)).astype(np.float32)
        update[0] += multiple * CLIP
        return update

    async def releases(self, rounds: Sequence[Reports]) -> list[Values]:
        """Without the one client, it sends zeros: the number of survivors is no secret."""
        return [self._release(names if set(names) & set(SENT) else (*names, "zeros")) for names in rounds]

    def _release(self, names: Reports) -> Values:
        total = np.zeros(self._encoding.length, np.uint32)
        for number, name in enumerate(names):
            examples = 5000.0 if name in SENT else 10.0 * (1 + number % 6)
            total += encode(self._encoding, self._updates[name], examples, {"loss": 9.0}, os.urandom)
        mean = secure.mean_update(self._spec, decode(self._encoding, total, len(names)))
        rule = build_secure_rule(self._spec)
        partial = rule.fold(rule.start(SIZE), VectorBlocks(mean), Contribution(1.0))
        return rule.apply(rule.init(SIZE), partial)[0].astype(np.float64)


async def measure(spec: JobSpec, num_survivors: int, encoding: Encoding | None = None) -> Audit:
    rng = np.random.default_rng(num_survivors)
    patterns = [tuple(rng.permutation(OTHERS)[: num_survivors - 1].tolist()) for _ in range(RUNS)]
    return await audit(Sums(spec, encoding or secure.build_encoding(spec, SIZE)), patterns)


def ratios(found: Audit, spec: JobSpec, num_survivors: int) -> list[float]:
    """The measured noise multipliers over that which the survivors imply."""
    mechanism = find_mechanism_of(spec, num_survivors)
    assert mechanism is not None
    return [found.multiplier(sender) / mechanism.noise_multiplier for sender in SENT if sender != "zeros"]


@pytest.mark.parametrize(
    ("num_survivors", "modulus", "bits"),
    [
        pytest.param(20, 32, 20, marks=pytest.mark.slow),
        pytest.param(18, 32, 20, marks=pytest.mark.slow),
        (14, 32, 20),
        pytest.param(18, 16, 14, marks=pytest.mark.slow),
    ],
)
async def test_the_noise_over_what_one_client_changes_is_that_of_the_survivors(
    num_survivors: int, modulus: int, bits: int
) -> None:
    spec = job(modulus, bits)
    found = await measure(spec, num_survivors)
    for ratio in ratios(found, spec, num_survivors):
        assert LOWEST <= ratio <= HIGHEST
    assert found.multiplier("zeros") > 2 * MULTIPLIER
    moved = {sender: values[0] * GOAL / CLIP for sender, values in found.moved.items()}
    assert moved == pytest.approx(
        {"zeros": 0.0, "the norm": 1.0, "against the others": -1.0, "far too much": 1.0}, abs=0.03
    )


@pytest.mark.slow
async def test_the_audit_finds_noise_of_too_few_clients() -> None:
    """Noise that is enough if all clients survive, of which 30 % are lost."""
    spec = job()
    encoding = secure.build_encoding(spec, SIZE)
    assert encoding.noise is not None
    less = replace(encoding.noise, variance=encoding.noise.variance * 14 / 20)
    found = await measure(spec, 14, replace(encoding, noise=less))
    assert max(ratios(found, spec, 14)) < 0.9 < LOWEST


@pytest.mark.slow
async def test_metrics_have_the_noise_of_the_survivors() -> None:
    spec = job(metrics="metrics = { noise_multiplier = 0.5, bounds = { loss = [0, 10], accuracy = [0, 1] } }")
    encoding = secure.build_encoding(spec, SIZE)
    update, found = np.zeros(SIZE, np.float32), list[list[float]]()
    for _ in range(300):
        total = np.zeros(encoding.length, np.uint32)
        for _ in range(14):
            total += encode(encoding, update, 50.0, {"loss": 9.0}, os.urandom)
        metrics = decode(encoding, total, 14).metrics
        found.append([metrics["loss"], metrics["accuracy"]])
    # Each client changes the sum of both, mapped to [-1, 1], by 2^(1/2) at most.
    deviation = 0.5 * np.sqrt(2.0) / 14 * np.array([5.0, 0.5])
    assert np.std(found, axis=0) == pytest.approx(deviation, rel=0.25)  # six standard errors
    assert np.mean(found, axis=0) - [9.0, 0.5] == pytest.approx(np.zeros(2), abs=6 * deviation[0] / np.sqrt(300))
