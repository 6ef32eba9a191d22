"""What a report may claim, and why an update does not fit: that is found in its header alone."""

from __future__ import annotations

import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest

from fedplat import claims, report_validation
from fedplat.aggregate import QFedAvg, Rule
from fedplat.model import Parameters
from fedplat.model.file import FilePart
from fedplat.rounds.commands import Verdict
from fedplat.rounds.states import Reason

MIB = 2**20
MODEL = Parameters.from_arrays({"weight": np.zeros(4 * MIB, np.float32)})
NUM_REPORTS = 14


def upload(path: Path, tensors: dict[str, int], header_bytes: int | None = None) -> Path:
    """A file of float32 vectors of zeros, which takes no room on the disk; its header is padded to some length."""
    entries, end = dict[str, object](), 0
    for name, count in tensors.items():
        entries[name] = {"dtype": "F32", "shape": [count], "data_offsets": [end, end + 4 * count]}
        end += 4 * count
    text = msgspec.json.encode(entries).ljust(header_bytes or 0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    path.write_bytes(MODEL.to_bytes())
    return path


@pytest.mark.parametrize("header_bytes", [101, 104])
@pytest.mark.fault("F23", "F46")
def test_memory_does_not_grow_with_a_misfit(base: Path, tmp_path: Path, header_bytes: int) -> None:
    """Neither with a header of an odd length, whose tensors would be copied, nor with one of another order."""
    odd = upload(tmp_path / "odd", {"a": 8 * MIB, "b": 0}, header_bytes)
    tracemalloc.start()
    try:
        with ThreadPoolExecutor(NUM_REPORTS) as pool:
            checks = [
                pool.submit(report_validation.validate_file, FilePart(odd), base, None) for _ in range(NUM_REPORTS)
            ]
            answers = {check.result() for check in checks}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answers == {Verdict(Reason.REJECTED_SCHEMA, "tensor 'weight' is missing (1 in all)")}
    assert peak < 4 * MIB


def test_the_header_of_a_version_is_read_once_while_its_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = mock.Mock(wraps=Parameters.open)
    monkeypatch.setattr(Parameters, "open", read)
    small, other = (Parameters.from_arrays({name: np.ones(3, np.float32)}).to_bytes() for name in ("a", "b"))
    base, update = tmp_path / "base", tmp_path / "update"
    base.write_bytes(small)
    update.write_bytes(small)
    assert [report_validation.validate_file(FilePart(update), base, None) for _ in range(5)] == [math.sqrt(3)] * 5
    assert report_validation.size_limit(base, None) > 2 * len(small)
    assert read.call_count == 1
    new = tmp_path / "new"
    new.write_bytes(other)
    new.replace(base)
    assert isinstance(report_validation.validate_file(FilePart(update), base, None), Verdict)
    assert read.call_count == 2


FITTING = {
    "bias": np.arange(5.0),
    "scale": np.array([1e300]),
    "step": np.array(3),
    "weight": np.ones((3, 2), np.float16),
}


@pytest.mark.parametrize(
    "update",
    [
        Parameters.from_arrays(FITTING | {"scale": np.array([2.0])}).to_bytes(),
        Parameters.from_arrays(FITTING).to_bytes(),
        Parameters.from_arrays(FITTING | {"bias": np.full(5, np.nan)}).to_bytes(),
        Parameters.from_arrays(FITTING).to_bytes() + b"0",
        Parameters.from_arrays(FITTING).to_bytes()[:-1],
        Parameters.from_arrays({"other": np.ones(3)}).to_bytes(),
        b"none",
    ],
    ids=["fits", "infinite", "nan", "longer", "shorter", "other", "no model"],
)
def test_bytes_are_validated_as_their_file_is(tmp_path: Path, update: bytes) -> None:
    base, file = tmp_path / "base", tmp_path / "update"
    base.write_bytes(Parameters.from_arrays(FITTING).to_bytes())
    file.write_bytes(update)
    assert report_validation.validate_content(update, base) == report_validation.validate_file(
        FilePart(file), base, None
    )


@pytest.mark.fault("F46")
def test_a_header_that_is_far_too_long_is_not_read(base: Path, tmp_path: Path) -> None:
    long = upload(tmp_path / "long", {"weight": 4 * MIB}, 16 * MIB)
    tracemalloc.start()
    try:
        answer = report_validation.validate_file(FilePart(long), base, None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(answer, Verdict)
    assert answer.text.startswith(f"the header has {16 * MIB} bytes; the base version's file has ")
    assert peak < MIB


QFEDAVG = QFedAvg().build()
"""A rule that needs the metric `loss_before`."""
FIT = {"loss_before": 1.0}


@pytest.mark.parametrize("rule", [QFEDAVG, None])
def test_a_report_within_the_bounds_is_accepted(rule: Rule | None) -> None:
    metrics = FIT | {"x" * 100: -1e300}
    for num_examples in (claims.MIN_EXAMPLES, 1.0, claims.MAX_EXAMPLES):
        assert report_validation.validate_claims(rule, num_examples, metrics).accepted


@pytest.mark.parametrize(
    ("num_examples", "metrics", "reason", "text"),
    [
        (0.0, FIT, Reason.REJECTED_WEIGHT, "num_examples is 0; expected a number from 1e-06 to 1e+15"),
        (math.nan, FIT, Reason.REJECTED_WEIGHT, "num_examples is nan"),
        (1.0, FIT | {"loss": math.nan}, Reason.REJECTED_METRICS, "'loss' is nan; expected a finite number"),
        (1.0, {f"m{i}": 0.0 for i in range(65)}, Reason.REJECTED_METRICS, "65 metrics; at most 64"),
        (1.0, FIT | {"x" * 101: 0.0}, Reason.REJECTED_METRICS, "has 101 bytes"),
        (1.0, FIT | {"a\nb": 0.0}, Reason.REJECTED_METRICS, "printable"),
        (1.0, {f"{i:0100}": 0.0 for i in range(41)}, Reason.REJECTED_METRICS, "4100 bytes in all; at most 4096"),
        (1.0, {"loss_before": -1.0}, Reason.REJECTED_METRICS, "loss_before is -1.0"),
        (1.0, {}, Reason.REJECTED_METRICS, "lacks the metric loss_before"),
    ],
)
def test_what_a_report_may_not_claim(num_examples: float, metrics: dict[str, float], reason: Reason, text: str) -> None:
    verdict = report_validation.validate_claims(QFEDAVG, num_examples, metrics)
    assert verdict.reason is reason
    assert text in verdict.text


def test_an_evaluation_needs_no_metric_of_the_rule() -> None:
    assert report_validation.validate_claims(None, 1.0, {}).accepted


def test_a_server_may_have_other_bounds_on_metrics() -> None:
    limits = claims.MetricLimits(num_metrics=1)
    verdict = report_validation.validate_claims(QFEDAVG, 1.0, FIT | {"loss": 1.0}, limits=limits)
    assert verdict.reason is Reason.REJECTED_METRICS
