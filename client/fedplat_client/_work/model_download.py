"""Get the model of an assignment: from the assignment itself, from the cache, from a delta, or by a full download.

A delta is a shorter way to the same bytes, and its failure is not an error: if the result does not have the model's
digest, the full model is downloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedplat.codecs.container import Format, options_from_text
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.errors import CodecError, ModelError, PluginError, UserCodeError
from fedplat.model import ModelFile, Parameters, Read, Segment, Values, apply_step, read_base_values
from fedplat.model.schema import MESSAGE_KEY
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._auth.calls import Connection
from fedplat_client._state.model_cache import ModelCache
from fedplat_client._work import failures, transfer
from fedplat_client.errors import TransferError
from fedplat_client.task import Control

_logger = logging.getLogger(__name__)


class DownloadedModel(NamedTuple):
    """A model, and a copy of it that a trainer may change."""

    base: Parameters
    working: Parameters

    @classmethod
    def open(cls, path: Path) -> DownloadedModel:
        """Map a file twice, so that only what the trainer changes is copied. Raises `ModelError` or `OSError`."""
        return cls(Parameters.open(path), Parameters.open(path, writable=True))


@dataclass(frozen=True)
class Downloader:
    """Gets models by their digest."""

    connection: Connection
    cache: ModelCache
    max_model_bytes: int
    plugins: Plugins = BUILTIN

    def get(self, assignment: fleet_pb2.Assignment, control: Control) -> DownloadedModel:
        """Return the model of an assignment.

        Raises `TransferError`, `ModelError`, `OSError`, `IdentityError`, or `Cancelled` if the task is stopped.
        """
        model = assignment.model
        if assignment.model_bytes:
            base = transfer.decode_model(model, assignment.model_bytes)
            return DownloadedModel(base, base.copy())
        path = self.cache.find(model.digest)
        if path is None and assignment.HasField("delta"):
            path = self._download_delta(model, assignment.delta, control)
        return DownloadedModel.open(path) if path is not None else self._download_full(model, control)

    def load(self, assignment: fleet_pb2.Assignment, control: Control) -> DownloadedModel:
        """Return the model of an assignment. Raises `AssignmentFailedError` if it cannot be loaded."""
        try:
            return self.get(assignment, control)
        except (TransferError, ModelError, OSError) as exc:
            control.signal.check()
            raise failures.AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED, f"the model could not be loaded: {exc}"
            ) from exc

    def _download_full(self, model: model_pb2.ModelRef, control: Control) -> DownloadedModel:
        """Download the model; one that exceeds the cache limit, or is used once, is not kept."""
        if model.size_bytes > self.max_model_bytes:
            raise TransferError(
                f"the server's model has {model.size_bytes} bytes; this client accepts at most "
                f"{self.max_model_bytes}. Raise max_model_bytes to train larger models"
            )
        is_kept = self.cache.make_room(model.size_bytes, model.digest)
        with self.cache.part(model.digest) as part:
            transfer.download(self.connection, model, part, control)
            path = self.cache.admit(part, model.digest)
        downloaded = DownloadedModel.open(path)
        if not is_kept or MESSAGE_KEY in downloaded.base:  # a message of a Flower app is for one task only
            path.unlink()  # the open file stays readable
        return downloaded

    def _download_delta(self, model: model_pb2.ModelRef, delta: fleet_pb2.ModelDelta, control: Control) -> Path | None:
        """Return the model's file, made from a delta; log why and return None if the delta cannot be used."""
        fields = {"version": model.version}
        try:
            base = self.cache.find(delta.base_digest)
            if base is None:
                _logger.info("The delta's base is not in the cache; downloading the full model.", extra=fields)
                return None
            path = self._rebuild(model, delta, base, control)
        except (TransferError, ModelError, CodecError, PluginError, UserCodeError, OSError) as exc:
            control.signal.check()
            _logger.warning("The delta cannot be used; downloading the full model: %s", exc, extra=fields)
            return None
        _logger.info("Built the model from a delta.", extra={**fields, "size_bytes": delta.size_bytes})
        return path

    def _rebuild(
        self, model: model_pb2.ModelRef, delta: fleet_pb2.ModelDelta, base_path: Path, control: Control
    ) -> Path:
        base = ModelFile.open(base_path)
        size_bytes = base.schema.file_size_bytes
        if model.size_bytes != size_bytes or delta.size_bytes >= size_bytes:
            raise TransferError(
                f"a delta of {delta.size_bytes} bytes for a base of {size_bytes} and a model of {model.size_bytes} "
                "bytes; expected a base and a model of equal size, and a smaller delta"
            )
        format = Format(options_from_text(delta.codec, self.plugins), base.schema)
        if not self.cache.make_room(2 * size_bytes + delta.size_bytes, model.digest, delta.digest, delta.base_digest):
            raise TransferError("cache_limit_bytes is too small for the model, its base and the delta together")
        with self.cache.part(delta.digest) as part:
            transfer.download(self.connection, delta, part, control)
            self.cache.check(part, delta.digest)
            try:
                return self._apply_step(base, format.open(part.path), model, control)
            finally:
                part.path.unlink()

    def _apply_step(self, base: ModelFile, step: Values, model: model_pb2.ModelRef, control: Control) -> Path:
        """Add the step to the base; write and hash the result window by window."""

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
                part.restart()  # otherwise the full download would resume from these bytes
                raise
            return self.cache.admit(part, model.digest)
