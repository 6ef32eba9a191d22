"""Encodes updates, with what the codec left out of the job's earlier ones, where it leaves out much."""

from __future__ import annotations

import hashlib
import logging

import numpy as np

from fedplat.codecs.container import Format
from fedplat.errors import CodecError
from fedplat.model import Values
from fedplat.wire.v1 import fleet_pb2
from fedplat_client._state.residuals import Residuals
from fedplat_client._state.two_phase import SentReport, WasMerged
from fedplat_client._work.transfer import Content

_logger = logging.getLogger(__name__)


def encode(
    assignment: fleet_pb2.Assignment,
    update: Values,
    format: Format,
    seed: int,
    residuals: Residuals,
    merged: WasMerged,
) -> Content:
    """Return the file of an update. Raises `CodecError` for one that cannot be encoded, and what `merged` does.

    `seed` is that of the codec's randomness. A residual that cannot be read or kept is no reason to fail.
    """
    broken = False
    if format.needs_feedback:
        try:
            content = _encode_with_feedback(assignment, update, format, seed, residuals, merged)
            if content is not None:
                return content
            _logger.warning("There is no room for what the codec leaves out (cache_limit_bytes).")
        except OSError as exc:
            _logger.warning("What the codec leaves out cannot be kept: %s", exc)
        except CodecError:
            broken = True
    content = Content.merge_parts(format.encode(update, np.random.default_rng(seed)))
    if broken:  # not because of the update, then
        residuals.forget(assignment.job_id)
    return content


def _encode_with_feedback(
    assignment: fleet_pb2.Assignment,
    update: Values,
    format: Format,
    seed: int,
    residuals: Residuals,
    merged: WasMerged,
) -> Content | None:
    """Return None if there is no room for what is left out; the residual that is there stays for another time then."""
    size, name = format.schema.num_floating, hashlib.sha256(format.prefix).hexdigest()
    residual = residuals.settle(assignment.job_id, name, size, merged)
    pieces, left_out = format.encode_with_feedback(update, residual, np.random.default_rng(seed))
    content = Content.merge_parts(pieces)
    sent = SentReport(assignment.token, content.digest)
    return content if residuals.keep(assignment.job_id, name, sent, left_out) else None
