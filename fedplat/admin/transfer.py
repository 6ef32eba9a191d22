"""The transfer of models between operators and a server: in chunks, with a check of the digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from fedplat import wire
from fedplat.errors import ModelError, ServerRefusedError
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2, model_pb2

ProgressCallback = Callable[[int, int], object]
"""Called with the number of bytes transferred so far, and the total."""


def chunks(parameters: Parameters, progress: ProgressCallback | None = None) -> Iterator[bytes]:
    """Yield the safetensors file in chunks; `progress` is called with the bytes taken so far and the total."""
    done, total = 0, parameters.schema.file_size_bytes
    for part in (memoryview(parameters.schema.header), parameters.buffer.data):
        for start in range(0, len(part), wire.UPLOAD_CHUNK_BYTES):
            chunk = bytes(part[start : start + wire.UPLOAD_CHUNK_BYTES])
            yield chunk
            done += len(chunk)
            if progress is not None:
                progress(done, total)


class OutgoingModel:
    """A model that is being uploaded, in chunks of at most `wire.UPLOAD_CHUNK_BYTES`."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks
        self._digest = hashlib.sha256()

    def requests(self) -> Iterator[admin_pb2.UploadModelRequest]:
        """Yield the messages of the upload."""
        for chunk in self._chunks:
            self._digest.update(chunk)
            yield admin_pb2.UploadModelRequest(data=chunk)

    def check(self, response: admin_pb2.UploadModelResponse) -> None:
        """Raise `ServerRefusedError` if the server stored other bytes than were sent."""
        sent = self._digest.hexdigest()
        if response.digest != sent:
            raise ServerRefusedError(
                f"the server stored a model with the digest {response.digest or '(none)'}, but {sent} was sent; "
                "try again"
            )


def receive_model(
    messages: Iterable[admin_pb2.ExportModelResponse], file: BinaryIO, progress: ProgressCallback | None
) -> model_pb2.ModelRef:
    """Write a model that arrives to a file. Raises `ModelError` if it has another size or digest than announced."""
    model: model_pb2.ModelRef | None = None
    digest = hashlib.sha256()
    size = 0
    for message in messages:
        if model is None:
            model = message.model
        digest.update(message.data)
        size += file.write(message.data)
        if size > model.size_bytes:
            break
        if progress is not None:
            progress(size, model.size_bytes)
    if model is None or size != model.size_bytes or digest.hexdigest() != model.digest:
        expected = f"{model.size_bytes} bytes with the digest {model.digest}" if model is not None else "a model"
        raise ModelError(
            f"the received model is damaged: expected {expected}, received {size} bytes with the digest "
            f"{digest.hexdigest()}; try again"
        )
    return model
