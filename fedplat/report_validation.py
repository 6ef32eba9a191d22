"""Validation of reports and their updates; the daemon and the simulator accept the same reports.

A report names an assignment, a number of examples, metrics, and the digest of an update if the
client trained. An update's file must begin with exactly the header of its base version; an encoded one with the lines
that follow from the job's codec and that header (`fedplat.codecs.container`). A different header is parsed only for the
message of the refusal. The coordinator compares norms and weights with those of other clients (`rounds.influence`).
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedplat import claims, codecs
from fedplat.aggregate import Rule, describe_metrics_problem, l2_norm
from fedplat.claims import MetricLimits
from fedplat.codecs.container import Format
from fedplat.errors import (
    CodecError,
    FlowerError,
    ModelError,
    PluginError,
    ProcedureError,
    SecureAggregationError,
    UserCodeError,
)
from fedplat.flower import layout
from fedplat.model import Blocks, ModelFile, Parameters, Schema, is_finite
from fedplat.model.file import FilePart, header_size, read_layout
from fedplat.model.running_norm import RunningNorm
from fedplat.model.turns import Turn
from fedplat.model.values import FlatModel
from fedplat.procedures import ReplySchema
from fedplat.rounds.commands import ACCEPTED, Verdict
from fedplat.rounds.states import Reason
from fedplat.secure_aggregation import encoding
from fedplat.secure_aggregation.setup import AnySetup

_ALL = Turn()
_SPARE_BYTES = 2**20
"""Bytes that an upload may announce beyond the exact size, so that the refusal can name the difference."""
_SPARE_HEADER_BYTES = 64 * 2**10
"""Bytes beyond twice the expected header up to which a different header is read, to state why it is refused."""


def validate_claims(
    rule: Rule | None, num_examples: float, metrics: Mapping[str, float], limits: MetricLimits = claims.DEFAULT_LIMITS
) -> Verdict:
    """Validate the numbers of a report; `rule` is that of the job for an update, None for an evaluation."""
    if problem := claims.check_examples(num_examples):
        return Verdict(Reason.REJECTED_WEIGHT, problem)
    if problem := claims.check_metrics(metrics, limits):
        return Verdict(Reason.REJECTED_METRICS, problem)
    if rule is not None and (problem := describe_metrics_problem(rule, metrics)):
        return Verdict(Reason.REJECTED_METRICS, problem)
    return ACCEPTED


def validate_schema(update: Schema, expected: Schema) -> Verdict:
    """Check that an update has the tensors of its base version."""
    difference = update.difference_from(expected)
    return Verdict(Reason.REJECTED_SCHEMA, difference) if difference else ACCEPTED


def measure_norm(values: Blocks) -> float | Verdict:
    """Return the L2 norm of float32 values, or a refusal if any of them is not finite.

    Summed in float64, the norm is finite if and only if all values are.
    """
    with np.errstate(invalid="ignore"):
        return _judge_norm(l2_norm(values))


def _judge_norm(norm: float) -> float | Verdict:
    return norm if math.isfinite(norm) else Verdict(Reason.REJECTED_NONFINITE)


def validate_file(
    update: FilePart,
    base: Path,
    codec: codecs.CodecOptions | None,
    running: RunningNorm | None = None,
    turn: Turn = _ALL,
) -> float | Verdict:
    """Return the L2 norm of the update in a file, or a refusal.

    The update has the tensors of a `turn`. Clients before 0.2 send the others, too.

    Reads the file at most once, and not at all if `running` has all of its bytes and the schema of `base`, which is the
    file of a version of the job. Memory does not grow with its size.
    """
    expected = _schema_of(base, turn)
    if running is not None and codec is None and (norm := running.find(expected)) is not None:
        return _judge_norm(norm)
    if codec is not None:
        try:
            return measure_norm(Format(codec, expected).open(*update).to_blocks())
        except (ModelError, CodecError, PluginError, UserCodeError) as exc:
            return Verdict(Reason.REJECTED_SCHEMA, str(exc))
    path, start, size_bytes = update
    with path.open("rb") as file:
        if size_bytes is None:
            size_bytes = path.stat().st_size - start
        file.seek(start)
        whole = _schema_of(base)
        if expected is not whole and file.read(len(whole.header)) == whole.header:
            expected = whole
        file.seek(start)
        same = file.read(len(expected.header)) == expected.header
        if not same or size_bytes != expected.file_size_bytes:
            file.seek(start)
            return Verdict(Reason.REJECTED_SCHEMA, _describe_difference(file, size_bytes, expected))
    return measure_norm(ModelFile(path, expected, start).to_blocks())


def validate_content(update: bytes, base: Path) -> float | Verdict:
    """Return what `validate_file` does, for the bytes of an update that has no codec."""
    expected = _schema_of(base)
    if len(update) != expected.file_size_bytes or not update.startswith(expected.header):
        return Verdict(Reason.REJECTED_SCHEMA, _describe_difference(io.BytesIO(update), len(update), expected))
    buffer = np.frombuffer(update, np.uint8, offset=len(expected.header))
    return measure_norm(Parameters(expected, buffer).to_blocks())


def validate_message(update: Path, array_types: Collection[str] = ()) -> float | Verdict:
    """Return 0 for the file of a client's reply in a Flower app, or a refusal.

    The reply may have any arrays, but each of them is what it claims to be, and has only finite numbers. `array_types`
    are serializations that the app has besides NumPy's. Memory does not grow with the file's size.
    """
    try:
        file = ModelFile.open(update)
        return validate_reply(file, file.to_blocks(), array_types)
    except ModelError as exc:
        return Verdict(Reason.REJECTED_SCHEMA, str(exc))


def validate_reply(file: FlatModel, values: Blocks, array_types: Collection[str] = ()) -> float | Verdict:
    """Return what `validate_message` does, for a file and its floating-point values."""
    try:
        is_finite_inside = layout.check_reply(file, array_types)
    except FlowerError as exc:
        return Verdict(Reason.REJECTED_SCHEMA, str(exc))
    return (check_finite(values) or 0.0) if is_finite_inside else Verdict(Reason.REJECTED_NONFINITE)


def validate_secure_claims(num_examples: float, metrics: Mapping[str, float]) -> Verdict:
    """Validate the numbers of a report with secure aggregation: those of the client are in its masked update."""
    if num_examples != 1.0:
        text = f"num_examples is {num_examples:g}; expected 1 with secure aggregation, and the number under the masks"
        return Verdict(Reason.REJECTED_WEIGHT, text)
    if metrics:
        text = f"the report has {len(metrics)} metrics; expected none with secure aggregation, but under the masks"
        return Verdict(Reason.REJECTED_METRICS, text)
    return ACCEPTED


def validate_masked(update: Path, setup: AnySetup) -> Verdict | None:
    """Return the refusal of a masked update, of which only the form can be checked; None if it is valid."""
    try:
        encoding.check_file(update, setup)
    except SecureAggregationError as exc:
        return Verdict(Reason.REJECTED_SCHEMA, str(exc))
    return None


def validate_reply_claims(num_examples: float, metrics: Mapping[str, float]) -> Verdict:
    """Validate the numbers of a report with the reply to a procedure, which has no others."""
    if num_examples != 1.0:
        text = f"num_examples is {num_examples:g}; expected 1 with a procedure, whose replies have their own numbers"
        return Verdict(Reason.REJECTED_WEIGHT, text)
    if metrics:
        text = f"the report has {len(metrics)} metrics; expected none with a procedure, which declares what leaves"
        return Verdict(Reason.REJECTED_METRICS, text)
    return ACCEPTED


def validate_integers(reply: bytes, schema: ReplySchema) -> Verdict | None:
    """Return the refusal of the reply to a procedure; None if it has the form and the bounds of its step."""
    try:
        schema.read(reply)
    except ProcedureError as exc:
        return Verdict(Reason.REJECTED_SCHEMA, str(exc))
    return None


def check_finite(values: Blocks) -> Verdict | None:
    """Return a refusal if any of the values is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return None if is_finite(values) else Verdict(Reason.REJECTED_NONFINITE)


def running_norm(base: Path, codec: codecs.CodecOptions | None, turn: Turn = _ALL) -> RunningNorm | None:
    """Return what measures an update while it arrives, for `validate_file`; None if only its whole file can be."""
    return RunningNorm(_schema_of(base, turn)) if codec is None else None


@lru_cache(maxsize=256)
def size_limit(base: Path, codec: codecs.CodecOptions | None) -> int:
    """Return the maximum bytes that an upload may announce. `base` is the file of a version, which is immutable."""
    if codec is None:
        return 2 * _schema_of(base).file_size_bytes + _SPARE_BYTES
    return Format(codec, _schema_of(base)).max_bytes + _SPARE_BYTES


def _schema_of(base: Path, turn: Turn = _ALL) -> Schema:
    """Return the schema of the updates of a version, which all clients of an attempt have, from its file."""
    found = base.stat()
    return turn.select_uploaded(_read_schema(base, found.st_ino, found.st_mtime_ns))


@lru_cache(maxsize=16)
def _read_schema(base: Path, inode: int, modified_ns: int) -> Schema:
    """Read the schema of a version that has this file: a server may fetch the file again, or restore it."""
    return Parameters.open(base).schema


def _describe_difference(update: BinaryIO, size_bytes: int, expected: Schema) -> str:
    """Describe how the update's header differs; a header that is far longer than expected is not read."""
    try:
        header_bytes = header_size(update.read(8), size_bytes)
        if header_bytes > 2 * len(expected.header) + _SPARE_HEADER_BYTES:
            return f"the header has {header_bytes} bytes; the base version's file has {len(expected.header) - 8}"
        layout = read_layout(update.read(header_bytes), size_bytes - 8 - header_bytes)
    except ModelError as exc:
        return str(exc)
    return layout.schema.difference_from(expected) or "the header is not byte for byte that of the base version's file"
