"""Encodes updates, with what the codec left out of the job's earlier ones, where it leaves out much."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedplat.codecs import with_error_feedback
from fedplat.errors import CodecError
from fedplat.model import Values
from fedplat.updates import Format
from fedplat.wire.v1 import fleet_pb2
from fedplat_client.connection import Connection
from fedplat_client.errors import CallRefusedError, ServerUnavailableError
from fedplat_client.options import Backoff, ClientOptions
from fedplat_client.residuals import Residuals, Sent
from fedplat_client.task import Control
from fedplat_client.transfer import Content

_ASK_ATTEMPTS = 3
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoder:
    """Makes what is sent; `residuals` are never a reason to fail."""

    connection: Connection
    residuals: Residuals
    options: ClientOptions

    def encode(self, assignment: fleet_pb2.Assignment, update: Values, format: Format, control: Control) -> Content:
        """The file of an update. Raises `CodecError` for one that cannot be encoded, and `IdentityError`."""
        seed, broken = self.options.rng.getrandbits(128), False
        if format.needs_feedback:
            try:
                content = self._with_feedback(assignment, update, format, seed, control)
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
        self, assignment: fleet_pb2.Assignment, update: Values, format: Format, seed: int, control: Control
    ) -> Content | None:
        """None if there is no room for what is left out; the residual that is there stays for another time then."""
        feedback, size = with_error_feedback(format.codec), format.schema.num_floating
        name = hashlib.sha256(format.prefix).hexdigest()
        residual = self.residuals.settle(assignment.job_id, name, size, self._was_merged(control))
        if residual is None:
            residual = feedback.init(size)
        payload, left = feedback.encode(residual, update.to_blocks(), np.random.default_rng(seed))
        content = Content.joined(format.framed([payload], update))
        sent = Sent(assignment.token, content.digest)
        return content if self.residuals.keep(assignment.job_id, name, sent, left) else None

    def _was_merged(self, control: Control) -> Callable[[Sent], bool]:
        def asked(sent: Sent) -> bool:
            """Reports again: an attempt that has ended gives its receipt only for what was merged."""
            request = fleet_pb2.ReportRequest(token=sent.token, digest=sent.digest)
            backoff = Backoff(self.options)
            for _ in range(_ASK_ATTEMPTS):
                try:
                    return self.connection.report(request).HasField("receipt")
                except CallRefusedError:
                    return False
                except ServerUnavailableError as exc:
                    control.wait(backoff.next_s(exc.retry))
            return False

        return asked
