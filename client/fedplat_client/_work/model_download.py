"""Gets the model of an assignment: as it was sent along, from the cache, from a delta, or as a whole.

A delta is a shorter way to the same bytes, and never a reason to fail: where it does not lead to the model's digest,
the whole model is downloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.codecs.container import Format, options_from_text
from fedplat.errors import CodecError, ModelError
from fedplat.model import ModelFile, Parameters, Read, Segment, Values, apply_step, read_base_values
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._auth.calls import Connection
from fedplat_client._state.model_cache import ModelCache
from fedplat_client._work import transfer
from fedplat_client.errors import TransferError
from fedplat_client.task import Control

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Downloader:
    """Models by their digest."""

    connection: Connection
    cache: ModelCache
    max_model_bytes: int

    def get(self, assignment: fleet_pb2.Assignment, control: Control) -> Parameters:
        """The model of an assignment.

        Raises `TransferError`, `ModelError`, `OSError`, `IdentityError`, or `Cancelled` when the task is stopped.
        """
        model = assignment.model
        if assignment.model_bytes:
            return transfer.decode_model(model, assignment.model_bytes)
        path = self.cache.find(model.digest)
        if path is None and assignment.HasField("delta"):
            path = self._from_delta(model, assignment.delta, control)
        return Parameters.open(path) if path is not None else self._whole(model, control)

    def _whole(self, model: model_pb2.ModelRef, control: Control) -> Parameters:
        """Downloads the model; one that is beyond the limit of the cache is used, and not kept."""
        if model.size_bytes > self.max_model_bytes:
            raise TransferError(
                f"the server's model has {model.size_bytes} bytes, and this client takes {self.max_model_bytes} at "
                "most; raise max_model_bytes if it is to work for such a job"
            )
        is_kept = self.cache.make_room(model.size_bytes, model.digest)
        with self.cache.part(model.digest) as part:
            transfer.download(self.connection, model, part, control)
            path = self.cache.admit(part, model.digest)
        parameters = Parameters.open(path)
        if not is_kept:
            path.unlink()  # what is open stays readable
        return parameters

    def _from_delta(self, model: model_pb2.ModelRef, delta: fleet_pb2.ModelDelta, control: Control) -> Path | None:
        """The model's file; None, said in the log, where the delta is of no use."""
        fields = {"version": model.version}
        try:
            base = self.cache.find(delta.base_digest)
            if base is None:
                _logger.info("The version before is not in the cache: the whole model is downloaded.", extra=fields)
                return None
            path = self._rebuilt(model, delta, base, control)
        except (TransferError, ModelError, CodecError, OSError) as exc:
            control.signal.check()
            _logger.warning("The delta is of no use, the whole model is downloaded: %s", exc, extra=fields)
            return None
        _logger.info("The model was made from a delta.", extra={**fields, "size_bytes": delta.size_bytes})
        return path

    def _rebuilt(
        self, model: model_pb2.ModelRef, delta: fleet_pb2.ModelDelta, base_path: Path, control: Control
    ) -> Path:
        base = ModelFile.open(base_path)
        size_bytes = base.schema.file_size_bytes
        if model.size_bytes != size_bytes or delta.size_bytes >= size_bytes:
            raise TransferError(
                f"a delta of {delta.size_bytes} bytes leads from {size_bytes} to {model.size_bytes} bytes; "
                "expected models of one size, and less than that"
            )
        format = Format(options_from_text(delta.codec), base.schema)
        if not self.cache.make_room(2 * size_bytes + delta.size_bytes, model.digest, delta.digest, delta.base_digest):
            raise TransferError("there is no room for a model beside its base (cache_limit_bytes)")
        with self.cache.part(delta.digest) as part:
            transfer.download(self.connection, delta, part, control)
            self.cache.check(part, delta.digest)
            try:
                return self._apply_step(base, format.open(part.path), model, control)
            finally:
                part.path.unlink()

    def _apply_step(self, base: ModelFile, step: Values, model: model_pb2.ModelRef, control: Control) -> Path:
        """The base with the step added, written and hashed window by window."""

        def read(read: Read, run: Segment) -> Iterator[npt.NDArray[Any]]:
            return step.read_carried(run) if base.schema.carry == "max" else read_base_values(read, run)

        with self.cache.part(model.digest) as part:
            part.restart()
            try:
                part.write(base.schema.header)
                for placed in apply_step(base, iter(step.to_blocks()), read):
                    control.signal.check()
                    part.write(placed.values.view(np.uint8).data)
            except BaseException:
                part.restart()  # else the download of the whole model would go on from here
                raise
            return self.cache.admit(part, model.digest)
