"""The checks of policies, codecs and partitions name the violation of each that is broken on purpose."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec import Struct

import fedplat.testing
from fedplat.codecs import Codec
from fedplat.codecs.codec import Source
from fedplat.model import Blocks, Vector, blocks
from fedplat.sampling import BasePolicy, Candidates, Policy
from fedplat.simulation.data import Dataset, Part, Partition
from fedplat.simulation.data.partitioners import BasePartition
from fedplat.testing import ConformanceError, check_codec, check_partition, check_policy

CALLS = itertools.count()


def test_the_docstrings_example_runs() -> None:
    results = doctest.testmod(fedplat.testing)
    assert results.attempted == 2
    assert not results.failed


class First(BasePolicy, frozen=True):
    """Draws always the same clients."""

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        return list(range(min(count, len(candidates))))


class WithReplacement(BasePolicy, frozen=True):
    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        return rng.integers(0, max(len(candidates), 1), min(count, len(candidates))).tolist()


class TooMany(BasePolicy, frozen=True):
    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        return rng.permutation(len(candidates)).tolist()


class OutOfRange(BasePolicy, frozen=True):
    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        return [len(candidates)]


class OwnRandomness(BasePolicy, frozen=True):
    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        own = np.random.default_rng(next(CALLS))
        return own.choice(len(candidates), min(count, len(candidates)), replace=False).tolist()


class SecretHistory(BasePolicy, frozen=True):
    """Uses the histories, although `remembers` is false."""

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        keys = rng.random(len(candidates))
        for index, history in candidates.list_known():
            keys[index] += history.round
        return keys.argsort()[:count].tolist()


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (First(), "32 of 40 clients are not drawn in 300 rounds of 8"),
        (WithReplacement(), "returns a candidate twice"),
        (TooMany(), "draw() of 1 from 2 returns 2 candidates; expected 1"),
        (OutOfRange(), "draw() of 1 from 0 returns [0]; expected an empty list: there may be no candidates"),
        (OwnRandomness(), "expected no other randomness and no memory"),
        (SecretHistory(), "expected remembers = True"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_broken_policy_fails_with_a_clear_sentence(policy: Policy, sentence: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_policy(policy)
    assert sentence in str(caught.value)


def write_halves(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
    return (block.astype("<f2").tobytes() for block in vector)


def read_halves(source: Source, size: int) -> Iterator[Vector]:
    for block in blocks(size):
        values = np.frombuffer(source.take(2 * (block.stop - block.start)), "<f2").astype(np.float32)
        yield np.nan_to_num(values)


def read_unchecked(source: Source, size: int) -> Iterator[Vector]:
    for block in blocks(size):
        yield np.frombuffer(source.take(2 * (block.stop - block.start)), "<f2").astype(np.float32)


def read_at_once(source: Source, size: int) -> Iterator[Vector]:
    whole = np.nan_to_num(np.frombuffer(source.take(2 * size), "<f2").astype(np.float32))
    return (whole[block] for block in blocks(size))


def write_at_random(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
    for block in vector:
        yield (block + np.float32(next(CALLS))).astype("<f2").tobytes()


def write_negated(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
    return ((-block).astype("<f2").tobytes() for block in vector)


def write_without_small(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
    for block in vector:
        block[np.abs(block) < 0.01] = 0.0
        yield block.astype("<f2").tobytes()


def read_turned(source: Source, size: int) -> Iterator[Vector]:
    """Turns all blocks but the first one round."""
    return (block[:: -1 if number else 1].copy() for number, block in enumerate(read_halves(source, size)))


def one_byte(size: int) -> int:
    return size


def two_bytes(size: int) -> int:
    return 2 * size


class Halves(Struct, frozen=True):
    """16-bit floats, with some functions replaced."""

    changes: dict[str, Any] = {}

    def build(self) -> Codec:
        functions: dict[str, Any] = {"write": write_halves, "read": read_halves, "max_bytes": two_bytes}
        return Codec(**{**functions, **self.changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_bytes": one_byte}, "1 entries have 2 bytes; expected at most max_bytes(), 1"),
        ({"read": read_unchecked}, "is decoded to NaN or infinite entries"),
        ({"read": read_at_once}, "expected that it yields one block after the other"),
        ({"write": write_at_random}, "two payloads of a vector and a seed differ"),
        ({"write": write_without_small}, "encode() writes into the vector that it receives"),
        ({"write": write_negated}, "the entries from 0 on are decoded to -1.00 times the original, on average"),
        ({"read": read_turned}, "the entries from 65,536 on are decoded to "),
        ({"read": read_turned, "needs_feedback": True}, "times as long as the vector; with needs_feedback"),
        ({"write": write_negated, "needs_feedback": True}, "times as long as the vector; with needs_feedback"),
    ],
)
def test_a_broken_codec_fails_with_a_clear_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_codec(Halves(changes))
    assert sentence in str(caught.value)


def test_a_correct_codec_passes() -> None:
    check_codec(Halves())


class Windows(BasePartition, frozen=True):
    clients: int
    step: int
    size: int

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        return [np.arange(self.size) + number * self.step for number in range(self.clients)]


class OwnSeed(BasePartition, frozen=True):
    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        return np.array_split(np.random.default_rng(next(CALLS)).permutation(len(dataset.inputs)), 5)


class Sorted(BasePartition, frozen=True):
    """Sorts the targets in place, so that they no longer belong to the inputs."""

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        dataset.targets.sort()
        return np.array_split(rng.permutation(len(dataset.inputs)), 5)


@pytest.mark.parametrize(
    ("partition", "sentence"),
    [
        (Windows(clients=5, step=10, size=20), "40 of 100 examples belong to a client twice, or to two clients"),
        (Windows(clients=5, step=2000, size=10), "client 3 has the examples 6000 to 6009; expected indices below 6000"),
        (Windows(clients=5, step=10, size=0), "5 of 5 clients have no example"),
        (Windows(clients=0, step=10, size=5), "there are no clients"),
        (Sorted(), "split() changes the targets of the data set"),
        (OwnSeed(), "two splits with the same generator differ"),
    ],
    ids=repr,
)
def test_a_broken_partition_fails_with_a_clear_sentence(partition: Partition, sentence: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_partition(partition)
    assert sentence in str(caught.value)
