"""A trainer for `fedplat-client --trainer support.spy:train` that notes the secrets which its own process handles.

They go to the file that SPY_FILE names, one a line as hex: session ids, nonces, signatures, assignment tokens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedplat.wire import auth
from fedplat_client import Task, TrainResult, transport
from fedplat_client._auth import authenticator

SECRET_KEYS = (auth.METADATA_SIGNATURE, auth.METADATA_NONCE, auth.METADATA_SESSION)
_file = Path(os.environ["SPY_FILE"])
_start = transport.Method[Any].start
_check_in = authenticator.Connection.check_in


def _note(secret: str | bytes) -> None:
    data = secret.encode() if isinstance(secret, str) else secret
    with _file.open("a") as file:
        file.write(data.hex() + "\n")


def _noting_start(self: Any, channel: Any, request: bytes, timeout_s: float, metadata: transport.Metadata) -> Any:
    for key, value in metadata:
        if key in SECRET_KEYS:
            _note(value)
    return _start(self, channel, request, timeout_s, metadata)


def _noting_check_in(self: Any, request: Any, signal: Any) -> Any:
    response = _check_in(self, request, signal)
    if response.HasField("assignment"):
        _note(response.assignment.token)
    return response


transport.Method.start = _noting_start
authenticator.Connection.check_in = _noting_check_in


def train(task: Task) -> TrainResult:
    task.parameters["weight"][:] += 1.0
    return TrainResult(parameters=task.parameters, num_examples=1, metrics={"loss": 0.5})
