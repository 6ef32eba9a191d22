"""Columns shared out: the shards' parts, put together, are what one accumulator gives, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fedplat import codecs
from fedplat.aggregate import (
    Accumulator,
    AdaptiveClip,
    Contribution,
    FedAdam,
    FedAvg,
    Robust,
    Rule,
    Shard,
    clip_by_norm,
    clip_by_quantile,
    column_start,
    compress_step,
    first_columns,
    read_columns,
    rebase,
    scalars_to_bytes,
    state_schema,
    weighted_mean,
)
from fedplat.aggregate.clipping import Release, privatize
from fedplat.aggregate.robust import Bucketing, NearestNeighbours
from fedplat.aggregate.state import Columns
from fedplat.codecs.container import Format
from fedplat.errors import ModelError
from fedplat.model import BLOCK, WINDOW, Bytes, Carry, ModelFile, Parameters, Values
from fedplat.model.blocks import ShardReduce, Terms, shards, single_shard
from fedplat.privacy import KEY_BYTES, Noise, PublishedMetrics, Tree
from support.robust_cases import CASES as ROBUST
from support.robust_cases import contributions
from support.rule_cases import CASES, make_options

Updates = Sequence[tuple[Values, Contribution]]
SMALL = BLOCK + 6


def mixed(seed: int, carry: Carry = "max") -> Parameters:
    """Every floating dtype, with shards that end within tensors, and counters between them."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {
        "double": rng.normal(size=WINDOW - 7),
        "counter": rng.integers(0, 1000, WINDOW + 3),
        "single": rng.normal(size=BLOCK + 11).astype(np.float32),
        "bf16": rng.normal(size=WINDOW).astype(ml_dtypes.bfloat16),
        "half": rng.normal(size=5).astype(np.float16),
        "mask": rng.random(6) < 0.3,
    }
    return Parameters.from_arrays(arrays, carry)


def plain(seed: int, size: int) -> Parameters:
    values = np.random.default_rng(seed).normal(0.05, 0.1, size).astype(np.float32)
    return Parameters.from_arrays({"w": values, "steps": np.array([seed, 7])}, "max")


class Sums:
    """What is added up across shards: the sums of one process are noted, and those of shards compared with them."""

    def __init__(self) -> None:
        self.totals = list[Terms]()
        self.terms = list[list[tuple[Terms, list[Terms]]]]()

    def alone(self, zero: Terms, terms: Iterable[Terms]) -> Terms:
        self.totals.append(single_shard(zero, terms))
        return self.totals[-1]

    def of_next_shard(self) -> ShardReduce:
        calls = list[tuple[Terms, list[Terms]]]()
        self.terms.append(calls)

        def across(zero: Terms, terms: Iterable[Terms]) -> Terms:
            calls.append((zero, [*terms]))
            return self.totals[len(calls) - 1]

        return across

    def check(self) -> None:
        for total, calls in zip(self.totals, zip(*self.terms, strict=True), strict=True):
            in_order = itertools.chain.from_iterable(terms for _, terms in calls)
            assert single_shard(calls[0][0], in_order).tobytes() == total.tobytes()
        self.terms.clear()


class Round:
    """One attempt of a rule, of which the columns are shared out."""

    def __init__(self, rule: Rule, base: Path, state: Path | None, scalars: Mapping[str, float]) -> None:
        self.rule, self.base, self.last, self.scalars = rule, ModelFile.open(base), state, scalars
        self.size = self.base.schema.num_floating

    def run(
        self, updates: Updates, columns: Sequence[range], across: Callable[[], ShardReduce]
    ) -> tuple[Bytes, Bytes, list[Accumulator]]:
        """The next flat buffer, the columns of the next state, and the shards."""
        model = np.zeros(self.base.schema.size_bytes, np.uint8)
        state = np.zeros(column_start(self.rule, self.size), np.uint8)
        shards, gathered = list[Accumulator](), list[Accumulator]()
        for index, mine in enumerate(columns):
            shards.append(Accumulator(self.base.schema, self.rule, self.scalars, Shard(mine, across(), not index)))
            for update, contribution in updates:
                shards[-1].fold(update, contribution)
            gathered.append(shards[-1].reduce_updates(self._columns(mine)))
        if not self.rule.blockwise:
            gathered, columns = [gathered[0].merge_shards([each.total for each in gathered])], [range(self.size)]
        for accumulator, mine in zip(gathered, columns, strict=True):
            end = column_start(self.rule, mine.start)
            for part in accumulator.parts(self.base, self._columns(mine)):
                content = part.model.view(np.uint8)
                model[part.start : part.start + content.size] = content
                for vector in (part.state or {}).values():
                    state[end : end + vector.nbytes] = vector.view(np.uint8)
                    end += vector.nbytes
        return model, state[column_start(self.rule, 0) :], shards

    def _columns(self, mine: range) -> Columns:
        if self.last is None:
            return first_columns(self.rule, len(mine))
        return read_columns(self.last, self.rule, self.size, mine)


def check(folder: Path, rule: Rule, base: Parameters, rounds: Sequence[Updates], numbers: Iterable[int]) -> None:
    """Each round in one process; then by shards, from the same files."""
    path, state, scalars = folder / "base", None, dict[str, float]()
    path.write_bytes(base.to_bytes())
    for number, updates in enumerate(rounds):
        sums, round_ = Sums(), Round(rule, path, state, scalars)
        size = round_.size
        model, columns, [accumulator] = round_.run(updates, [range(size)], lambda sums=sums: sums.alone)
        for count in numbers:
            found, state_found, shards_found = round_.run(updates, shards(size, count), sums.of_next_shard)
            assert found.tobytes() == model.tobytes(), count  # no comparison that pytest explains: it takes minutes
            assert state_found.tobytes() == columns.tobytes(), count
            sums.check()
            for each in shards_found:
                assert dict(each.scalars) == dict(accumulator.scalars)
                assert each.published == accumulator.published
                assert (each.num_updates, each.total_weight) == (accumulator.num_updates, accumulator.total_weight)
        scalars = dict(accumulator.scalars)
        path = folder / f"base{number}"
        path.write_bytes(base.schema.header + model.tobytes())
        if names := rule.init(0):
            state = folder / f"state{number}"
            header = state_schema(names, size, scalars).header
            state.write_bytes(header + scalars_to_bytes(scalars) + columns.tobytes())


def folded(updates: list[Parameters], known: list[Contribution]) -> Updates:
    return list(zip(updates, known, strict=True))


def some(number: int) -> list[Contribution]:
    metrics = {"local_steps": 5.0, "loss_before": 2.3, "loss": 0.5}
    return [Contribution(0.9 - index / 7, 10.0, {**metrics, "local_steps": 5.0 + index}) for index in range(number)]


@pytest.mark.parametrize("name", CASES)
def test_every_rule_on_every_dtype(name: str, tmp_path: Path):
    rounds = [folded([mixed(10 * round_ + index) for index in (1, 2)], some(2)) for round_ in range(2)]
    check(tmp_path, make_options(name).build(), mixed(0), rounds, (1, 2, 3))


@pytest.mark.parametrize("name", CASES)
def test_every_rule_on_a_model_smaller_than_the_shards(name: str, tmp_path: Path):
    rounds = [folded([plain(10 * round_ + index, SMALL) for index in (1, 2)], some(2)) for round_ in range(2)]
    check(tmp_path, make_options(name).build(), plain(0, SMALL), rounds, (3,))


@pytest.mark.parametrize(
    ("name", "before"),
    [*((name, ()) for name in ROBUST), *((name, (NearestNeighbours(), Bucketing())) for name in ("median", "krum"))],
)
def test_every_robust_rule(name: str, before: Any, tmp_path: Path):
    rule = Robust(ROBUST[name].rule, 1, before).build(1)(FedAdam().build())
    size, number = WINDOW + 77, 10 if before else 7
    rounds = [
        folded([plain(100 * round_ + index, size) for index in range(number)], contributions(number))
        for round_ in range(2)
    ]
    check(tmp_path, rule, plain(0, size), rounds, (2, 3))  # of three, one is empty


def private(clip: float | AdaptiveClip, tree: Tree | None) -> Rule:
    release = Release(
        noise_multiplier=0.5,
        clip=clip,
        expected_weight=4.0,
        expected_reports=5,
        count_deviation=1.0,
        metrics=PublishedMetrics(bounds={"loss": (0.0, 1.0)}, noise_multiplier=2.0),
        tree=tree,
    )
    clipped = clip_by_quantile(clip) if isinstance(clip, AdaptiveClip) else clip_by_norm(clip)
    return privatize(release, Noise(bytes(KEY_BYTES)))(clipped(FedAdam().build()))


OTHERS = {
    "clipped": clip_by_norm(3.0)(FedAdam().build()),
    "clipped by a quantile": clip_by_quantile(AdaptiveClip(initial_norm=5.0))(weighted_mean()),
    "private": private(3.0, None),
    "private tree with adaptive clipping": private(AdaptiveClip(initial_norm=5.0), Tree(4)),
    "downlink": compress_step(codecs.TopK(fraction=0.1).build(), 7, lambda _: None)(FedAdam().build()),
    "robust with a downlink": compress_step(codecs.Bf16().build(), 7, lambda _: None)(
        Robust(ROBUST["geometric-median"].rule, 1).build(1)(FedAvg().build())
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_norms_noise_and_encoded_steps(name: str, tmp_path: Path):
    rounds = [folded([mixed(10 * round_ + index) for index in range(4)], some(4)) for round_ in range(2)]
    check(tmp_path, OTHERS[name], mixed(0), rounds, (2, 3))


def test_files_encoded_updates_and_rebased_ones(tmp_path: Path):
    """Each shard reads its part of a file, and passes over what comes before it where that has to be decoded."""
    base, origin = mixed(0), mixed(5)
    files: list[Values] = []
    for index in range(3):
        path, update = tmp_path / str(index), mixed(1 + index)
        path.write_bytes(update.to_bytes())
        files.append(ModelFile.open(path))
        format = Format(codecs.Quantize(bits=8, zstd=index == 1), base.schema)
        path = tmp_path / f"encoded{index}"
        path.write_bytes(b"".join(format.encode(update, np.random.default_rng(1))))
        files.append(format.open(path))
        files.append(rebase(files[-2], origin, base))
    known = some(4) + some(4) + some(1)
    check(tmp_path, clip_by_norm(100.0)(weighted_mean()), base, [list(zip(files, known, strict=True))], (2,))


def test_only_the_columns_of_a_shard_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "m").write_bytes(plain(0, 3 * WINDOW).to_bytes())
    file = ModelFile.open(tmp_path / "m")
    read = list[int]()
    preadv = ModelFile.reader

    def counted(self: ModelFile, longest: int) -> Any:
        @contextlib.contextmanager
        def reader() -> Any:
            with preadv(self, longest) as inner:

                def noted(start: int, size: int) -> Bytes:
                    read.append(size)
                    return inner(start, size)

                yield noted

        return reader()

    monkeypatch.setattr(ModelFile, "reader", counted)
    parts = [block.copy() for columns in shards(3 * WINDOW, 2) for block in file.to_blocks(columns)]
    assert sum(read) == 4 * 3 * WINDOW
    assert np.array_equal(np.concatenate(parts), plain(0, 3 * WINDOW)["w"])


@pytest.mark.parametrize("size", [0, 1, WINDOW, 2 * WINDOW + 1, 7 * WINDOW])
@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_shards_cover_all_columns(size: int, number: int):
    found = shards(size, number)
    assert len(found) == number
    assert [column for each in found for column in (each.start, each.stop)][1:-1:2] == [e.start for e in found[1:]]
    assert (found[0].start, found[-1].stop) == (0, size)
    assert all(each.start % WINDOW == 0 or not each for each in found)
    lengths = [-(-len(each) // WINDOW) for each in found]
    assert max(lengths) - min(lengths) <= 1


def test_a_shard_that_is_not_finite_is_refused():
    base = Parameters.from_arrays({"w": np.full(WINDOW + 2, 3e38, np.float32)})
    for bad, columns in zip((WINDOW + 1, 0), shards(base.schema.num_floating, 2), strict=True):
        update = Parameters.zeros(base.schema)
        update["w"][bad] = 3e38  # beyond what float32 holds, and in the other shard
        assert_fits(base, update, columns)
        update["w"][columns.start] = 3e38
        with pytest.raises(ModelError, match="not finite"):
            assert_fits(base, update, columns)


def assert_fits(base: Parameters, update: Parameters, columns: range) -> None:
    accumulator = Accumulator(base.schema, FedAvg().build(), None, Shard(columns, single_shard, columns.start == 0))
    accumulator.fold(update, Contribution(1.0))
    for part in accumulator.parts(base, first_columns(FedAvg().build(), len(columns))):
        assert part.start == 4 * columns.start or len(columns) > WINDOW
