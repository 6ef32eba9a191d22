"""What a plugin raises in its own code is a `ConformanceError` of each check, with the line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch")
from msgspec import Struct

from fedplat import testing
from fedplat.aggregate import server_optimizer, weighted_mean
from fedplat.codecs import Codec, CodecError
from fedplat.model import Parameters
from fedplat.testing import ConformanceError


def fail(*_: Any, **__: Any) -> Any:
    """Stand for any method of a plugin with a mistake."""
    return {}["step"]


class Raises:
    """Attributes of all kinds; each method raises `KeyError`."""

    build = draw = split = load = weight = compute = fewest = spells = initial = train = evaluate = fail
    before = rows_of = measure = total = combine = start = values = update = fail
    works_on_mean = remembers = False


class RuleRaises(Struct, frozen=True):
    works_on_mean: ClassVar[bool] = True

    def build(self) -> Any:
        return server_optimizer(lambda size: {}, fail)(weighted_mean())


class ReadRaises(Struct, frozen=True):
    def build(self) -> Codec:
        def write(vector: Any, rng: Any) -> Any:
            return (block.astype("<f4").tobytes() for block in vector)

        def read(source: Any, size: int) -> Any:
            raise CodecError("the payload ends after 4 bytes")
            yield

        return Codec(write=write, read=read, max_bytes=lambda size: 4 * size + 100, needs_feedback=False)


class InMethods(Raises, Struct, frozen=True):
    """A record whose methods raise."""


DATA = (np.eye(2, dtype=np.float32), np.arange(2))
CHECKS: Mapping[str, Callable[[], None]] = {
    "rule": lambda: testing.check_rule(RuleRaises()),
    "rule that cannot be built": lambda: testing.check_rule(InMethods()),  # pyright: ignore
    "codec": lambda: testing.check_codec(ReadRaises()),
    "codec that cannot be built": lambda: testing.check_codec(InMethods()),  # pyright: ignore
    "policy": lambda: testing.check_policy(InMethods()),  # pyright: ignore
    "partition": lambda: testing.check_partition(InMethods()),  # pyright: ignore
    "source": lambda: testing.check_source(InMethods()),  # pyright: ignore
    "staleness": lambda: testing.check_staleness(InMethods()),  # pyright: ignore
    "availability": lambda: testing.check_availability(InMethods()),  # pyright: ignore
    "distribution": lambda: testing.check_distribution(InMethods()),  # pyright: ignore
    "robust rule": lambda: testing.check_robust_rule(InMethods()),  # pyright: ignore
    "pre-aggregator": lambda: testing.check_pre_aggregator(InMethods()),  # pyright: ignore
    "algorithm": lambda: testing.check_algorithm(InMethods()),  # pyright: ignore
    "metric": lambda: testing.check_metric(InMethods()),  # pyright: ignore
    "engine": lambda: testing.check_engine(InMethods()),  # pyright: ignore
    "learner": lambda: testing.check_learner(Raises(), DATA),  # pyright: ignore
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_a_plugin_raises_is_a_failed_check(name: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        CHECKS[name]()
    assert len(str(caught.value).splitlines()) == 1


def test_the_line_of_the_plugin_is_named() -> None:
    with pytest.raises(ConformanceError, match=r"the plugin raised KeyError: 'step' \(.*test_raising_plugins.py, line"):
        testing.check_rule(RuleRaises())


def test_a_learner_may_raise_in_any_method() -> None:
    class Diverges(Raises):
        def initial(self, seed: int) -> Parameters:
            return Parameters.from_arrays({"w": np.zeros(2, np.float32)})

    with pytest.raises(ConformanceError, match="training_changes_the_model: the plugin raised KeyError"):
        testing.check_learner(Diverges(), DATA)  # pyright: ignore
