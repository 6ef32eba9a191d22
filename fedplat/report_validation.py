"""What a report may claim and what its update must be; the daemon and the simulator accept the same reports.

A report names an assignment (`Assignment.kind`), a number of examples, metrics, and the digest of an update if the
client trained. An update's file must begin with the very header of its base version, an encoded one with the lines that
follow from the job's codec and that header (`fedplat.codecs.container`). So nothing of a foreign header is parsed or
believed unless the update is refused anyway, and then only to say why. Norms and weights are judged beside those of
other clients, by the coordinator (`rounds.influence`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedplat import claims, codecs
from fedplat.aggregate import Rule, l2_norm, unusable
from fedplat.claims import MetricLimits
from fedplat.codecs.container import Format
from fedplat.errors import CodecError, ModelError
from fedplat.model import Blocks, ModelFile, Parameters, Schema, header
from fedplat.rounds.states import AttemptKind, Reason
from fedplat.rounds.transition import ACCEPTED, Verdict

_SPARE_BYTES = 2**20
"""An upload may announce so much more than the exact size, so that a misfit is refused by name."""
_SPARE_HEADER_BYTES = 64 * 2**10
"""How much longer than twice the expected header another one may be, to be read for the sake of a good reason."""


def validate_claims(
    rule: Rule,
    kind: AttemptKind,
    num_examples: float,
    metrics: Mapping[str, float],
    digest: str = "",
    limits: MetricLimits = claims.DEFAULT_LIMITS,
) -> Verdict:
    """Return whether a report's numbers are acceptable for an assignment of this kind; `rule` is the job's."""
    if problem := claims.check_examples(num_examples):
        return Verdict(Reason.REJECTED_WEIGHT, problem)
    if problem := claims.check_metrics(metrics, limits):
        return Verdict(Reason.REJECTED_METRICS, problem)
    if kind is AttemptKind.TRAIN and (problem := unusable(rule, metrics)):
        return Verdict(Reason.REJECTED_METRICS, problem)
    if kind is AttemptKind.EVALUATE and digest:
        return Verdict(Reason.REJECTED_DIGEST, "an evaluation has no update")
    return ACCEPTED


def validate_schema(update: Schema, expected: Schema) -> Verdict:
    """Return whether an update has the tensors of its base version."""
    difference = update.difference_from(expected)
    return Verdict(Reason.REJECTED_SCHEMA, difference) if difference else ACCEPTED


def measure_norm(values: Blocks) -> float | Verdict:
    """Return the L2 norm of float32 values, which is finite in float64 if and only if all of them are; or a refusal."""
    with np.errstate(invalid="ignore"):
        norm = l2_norm(values)
    return norm if math.isfinite(norm) else Verdict(Reason.REJECTED_NONFINITE)


def validate_file(update: Path, base: Path, codec: codecs.Options | None) -> float | Verdict:
    """Return the L2 norm of the update in a file, or its refusal. Reads it once at most; memory does not grow with it.

    `base` is the file of a version of the job.
    """
    expected = Parameters.open(base).schema
    if codec is not None:
        try:
            return measure_norm(Format(codec, expected).open(update).to_blocks())
        except (ModelError, CodecError) as exc:
            return Verdict(Reason.REJECTED_SCHEMA, str(exc))
    with update.open("rb") as file:
        same = file.read(len(expected.header)) == expected.header
    if not same or update.stat().st_size != expected.file_size_bytes:
        return Verdict(Reason.REJECTED_SCHEMA, _describe_difference(update, expected))
    return measure_norm(ModelFile(update, expected).to_blocks())


@lru_cache(maxsize=256)
def size_limit(base: Path, codec: codecs.Options | None) -> int:
    """Return the most bytes that an upload may announce. `base` is the file of a version, which never changes."""
    if codec is None:
        return 2 * base.stat().st_size + _SPARE_BYTES
    return Format(codec, Parameters.open(base).schema).max_bytes + _SPARE_BYTES


def _describe_difference(update: Path, expected: Schema) -> str:
    """Return what differs, by the update's header alone; one that is far longer than expected is not read either."""
    try:
        with update.open("rb") as file:
            size_bytes = update.stat().st_size
            header_bytes = header.header_size(file.read(8), size_bytes)
            if header_bytes > 2 * len(expected.header) + _SPARE_HEADER_BYTES:
                return f"the header has {header_bytes} bytes; the base version's file has {len(expected.header) - 8}"
            layout = header.read_layout(file.read(header_bytes), size_bytes - 8 - header_bytes)
    except ModelError as exc:
        return str(exc)
    return layout.schema.difference_from(expected) or "the header is not byte for byte that of the base version's file"
