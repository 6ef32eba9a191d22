"""Encoding updates, with error feedback: what a lossy codec left out of one update is added to the job's next one."""

from __future__ import annotations

import hashlib
import logging

import numpy as np

from fedplat import codecs, errors
from fedplat.codecs.container import Format, options_from_text
from fedplat.config.plugins import Plugins
from fedplat.model import Values
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._state.two_phase import Residuals, SentReport, WasMerged
from fedplat_client._work import failures, transfer
from fedplat_client.errors import ServerUnavailableError

_logger = logging.getLogger(__name__)


def read_codec(assignment: fleet_pb2.Assignment, plugins: Plugins) -> codecs.CodecOptions | None:
    """Return the codec of an assignment, or None. Raises `AssignmentFailedError` if the client does not support it."""
    try:
        return options_from_text(assignment.uplink, plugins) if assignment.uplink else None
    except errors.CodecError as exc:
        raise failures.AssignmentFailedError(model_pb2.REASON_UNKNOWN_CODEC, str(exc)) from exc


def encode(
    assignment: fleet_pb2.Assignment, update: Values, format: Format, seed: int, residuals: Residuals, merged: WasMerged
) -> transfer.Content:
    """Return the encoded file of an update.

    `seed` seeds the codec's randomness. If the residual cannot be read or stored, encode without feedback. Raises
    `CodecError` if the update cannot be encoded, and the errors of `merged`.
    """
    is_residual_broken = False
    if format.needs_feedback:
        try:
            content = _encode_with_feedback(assignment, update, format, seed, residuals, merged)
            if content is not None:
                return content
            _logger.warning("The codec's residual exceeds cache_limit_bytes; encoding without error feedback.")
        except OSError as exc:
            _logger.warning("The codec's residual cannot be stored: %s", exc)
        except errors.CodecError:
            is_residual_broken = True
    content = transfer.Content.merge_parts(format.encode(update, np.random.default_rng(seed)))
    if is_residual_broken:  # the update alone can be encoded, so the residual is the cause
        residuals.forget(assignment.job_id)
    return content


def _encode_with_feedback(
    assignment: fleet_pb2.Assignment, update: Values, format: Format, seed: int, residuals: Residuals, merged: WasMerged
) -> transfer.Content | None:
    """Return None if the new residual exceeds the size limit; the stored residual then stays."""
    size, name = format.schema.num_floating, hashlib.sha256(format.prefix).hexdigest()
    residual = residuals.load(assignment.job_id, name, size, _or_unknown(merged))
    pieces, left_out = format.encode_with_feedback(update, residual, np.random.default_rng(seed))
    content = transfer.Content.merge_parts(pieces)
    sent = SentReport(assignment.token, content.digest)
    return content if residuals.stage(assignment.job_id, name, sent, left_out) else None


def _or_unknown(merged: WasMerged) -> WasMerged:
    """Count an update as not merged if the server does not answer: a lost residual only slows a codec down."""

    def was_merged(sent: SentReport) -> bool:
        try:
            return merged(sent)
        except ServerUnavailableError:
            return False

    return was_merged
