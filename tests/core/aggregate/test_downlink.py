"""Steps that are encoded: nothing gets lost, and the same updates give the same bits."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from fedplat import codecs
from fedplat.aggregate import (
    Accumulator,
    Contribution,
    FedAvg,
    FedAvgM,
    Rule,
    State,
    compress_step,
    first_columns,
    read_columns,
    seed_of,
    state_to_bytes,
)
from fedplat.errors import CodecError
from fedplat.model import WINDOW, Parameters, Vector, VectorBlocks

SIZE = 70_000
NUM_ROUNDS = 12
OPTIONS = {
    **{name: record() for name, record in codecs.CODECS.items()},
    "eden, 1 bit": codecs.Eden(bits=1),
    "quantize, 4 bits": codecs.Quantize(bits=4),
}


def ignored(_: bytes) -> None:
    pass


def steps_of(inner: Rule, wrap: Callable[[int], Rule]) -> tuple[list[Vector], list[Vector], list[Vector]]:
    """What a rule wants to do in each round, what its wrapped form does, and what is left each time."""
    rng, wanted, done, left = np.random.default_rng(5), list[Vector](), list[Vector](), list[Vector]()
    inner_state, state = inner.init(SIZE), wrap(0).init(SIZE)
    for number in range(NUM_ROUNDS):
        rule = wrap(number)
        update = VectorBlocks((rng.normal(size=SIZE) * rng.exponential(size=SIZE) ** 2).astype(np.float32))
        step, inner_state = inner.apply(inner_state, inner.fold(inner.start(SIZE), update, Contribution(1.0)))
        wanted.append(step)
        step, state = rule.apply(state, rule.fold(rule.start(SIZE), update, Contribution(1.0)))
        done.append(step)
        left.append(state["residual"])
    return wanted, done, left


@pytest.mark.parametrize("name", OPTIONS)
def test_what_was_done_and_what_is_left_is_what_was_wanted(name: str):
    inner, codec = FedAvgM(momentum=0.5).build(), OPTIONS[name].build()
    wanted, done, left = steps_of(inner, lambda n: compress_step(codec, seed_of("job", n), ignored)(inner))
    for number in range(NUM_ROUNDS):
        total = np.sum(wanted[: number + 1], axis=0, dtype=np.float64)
        made = np.sum(done[: number + 1], axis=0, dtype=np.float64) + left[number]
        np.testing.assert_allclose(made, total, atol=1e-4 * np.abs(total).max())
    sizes = [float(np.linalg.norm(residual)) for residual in left]
    assert max(sizes) <= (25 if name == "topk" else 4) * np.linalg.norm(wanted[0]), "what is left does not grow forever"


@pytest.mark.parametrize("name", OPTIONS)
def test_the_reference_in_numpy(name: str):
    """DoubleSqueeze, Algorithm 1, lines of the server: v + δ is encoded, δ is what the payload does not say."""
    inner, codec, payloads = FedAvg().build(), OPTIONS[name].build(), list[bytes]()
    wanted, done, left = steps_of(inner, lambda n: compress_step(codec, seed_of("job", n), payloads.append)(inner))
    residual = np.zeros(SIZE, np.float32)
    for number in range(NUM_ROUNDS):
        vector = wanted[number] + residual
        payload = b"".join(codec.encode(VectorBlocks(vector), np.random.default_rng(seed_of("job", number))))
        decoded = np.concatenate([block.copy() for block in codec.decode(payload, SIZE)])
        residual = vector - decoded
        assert payload == payloads[number]
        assert decoded.tobytes() == done[number].tobytes()
        assert residual.tobytes() == left[number].tobytes()


def test_each_version_of_each_job_has_a_seed_of_its_own():
    seeds = [seed_of(job, version) for job in ("a", "a 1", "b") for version in range(3)]
    assert len({*seeds}) == 9
    expected = hashlib.sha256(b"downlink a 1").hexdigest()
    assert seed_of("a", 1) == int(expected, 16), "stored versions are recomputed with it"


def test_it_is_not_blockwise_and_has_one_memory():
    codec = codecs.Eden().build()
    rule = compress_step(codec, 1, ignored)(FedAvgM().build())
    assert not rule.blockwise
    assert {*rule.init(3)} == {"velocity", "residual"}
    with pytest.raises(ValueError, match="residual"):
        compress_step(codec, 1, ignored)(rule).init(3)


def test_a_step_that_is_not_finite_is_an_error():
    rule = compress_step(codecs.Eden().build(), 1, ignored)(FedAvg().build())
    partial = dataclasses.replace(rule.start(3), total=np.full(3, np.inf, np.float32), weight=1.0, num_updates=1)
    with pytest.raises(CodecError, match="NaN or infinite"):
        rule.apply(rule.init(3), partial)


@pytest.mark.parametrize("size", [0, 1, WINDOW + 5])
def test_the_state_goes_through_its_file(tmp_path: Path, size: int):
    """As the server does it: out of the file of one version, into that of the next."""
    base = Parameters.from_arrays({"weight": np.ones(size, np.float32), "steps": np.array([3, 4])})
    rule = compress_step(codecs.TopK(fraction=0.1).build(), 7, ignored)(FedAvg().build())
    columns, outcomes = first_columns(rule, size), list[bytes]()
    for number in range(2):
        accumulator = Accumulator(base.schema, rule)
        update = Parameters.zeros(base.schema)
        update["weight"] += np.random.default_rng(number).normal(size=size).astype(np.float32)
        accumulator.fold(update, Contribution(1.0))
        state = {name: np.concatenate(parts) for name, parts in _columns(accumulator, base, columns).items()}
        outcomes.append(state["residual"].tobytes())
        (tmp_path / "state").write_bytes(state_to_bytes(state))
        columns = read_columns(tmp_path / "state", rule, size)
    assert len(outcomes[1]) == 4 * size
    assert size < 2 or outcomes[0] != outcomes[1]


def _columns(accumulator: Accumulator, base: Parameters, state: Iterable[State]) -> dict[str, list[Vector]]:
    found: dict[str, list[Vector]] = {}
    for part in accumulator.parts(base, state):
        for name, vector in (part.state or {}).items():
            found.setdefault(name, []).append(vector.copy())
    return found
