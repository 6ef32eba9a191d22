"""Encodes updates, with what the codec left out of the job's earlier ones, where it leaves out much."""

from __future__ import annotations

import hashlib
import logging
import random
from dataclasses import dataclass

import numpy as np

from fedplat.codecs import with_error_feedback
from fedplat.errors import CodecError
from fedplat.model import Values
from fedplat.updates import Format
from fedplat.wire.v1 import fleet_pb2
from fedplat_client.provisional import Sent, WasMerged
from fedplat_client.residuals import Residuals
from fedplat_client.transfer import Content

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoder:
    """Makes what is sent; `residuals` are never a reason to fail."""

    residuals: Residuals
    rng: random.Random

    def encode(self, assignment: fleet_pb2.Assignment, update: Values, format: Format, merged: WasMerged) -> Content:
        """The file of an update. Raises `CodecError` for one that cannot be encoded, and what `merged` does."""
        seed, broken = self.rng.getrandbits(128), False
        if format.needs_feedback:
            try:
                content = self._with_feedback(assignment, update, format, seed, merged)
                if content is not None:
                    return content
                _logger.warning("There is no room for what the codec leaves out (cache_limit_bytes).")
            except OSError as exc:
                _logger.warning("What the codec leaves out cannot be kept: %s", exc)
            except CodecError:
                broken = True
        content = Content.joined(format.encode(update, np.random.default_rng(seed)))
        if broken:  # not because of the update, then
            self.residuals.forget(assignment.job_id)
        return content

    def _with_feedback(
        self, assignment: fleet_pb2.Assignment, update: Values, format: Format, seed: int, merged: WasMerged
    ) -> Content | None:
        """None if there is no room for what is left out; the residual that is there stays for another time then."""
        feedback, size = with_error_feedback(format.codec), format.schema.num_floating
        name = hashlib.sha256(format.prefix).hexdigest()
        residual = self.residuals.settle(assignment.job_id, name, size, merged)
        if residual is None:
            residual = feedback.init(size)
        payload, left = feedback.encode(residual, update.to_blocks(), np.random.default_rng(seed))
        content = Content.joined(format.framed([payload], update))
        sent = Sent(assignment.token, content.digest)
        return content if self.residuals.keep(assignment.job_id, name, sent, left) else None
