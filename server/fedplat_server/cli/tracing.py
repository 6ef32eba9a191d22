"""The option `--traces` of `fedplat-server run`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fedplat.extras import install_command
from fedplat_server.errors import ConfigError

if TYPE_CHECKING:
    from fedplat_server.tracing.provider import Tracing

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The variables of OpenTelemetry that name the receiver if `--traces` does not."""
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def open_tracing(url: str, environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """Return the tracing to a receiver; None without a URL, or if OpenTelemetry is disabled by its own variables.

    Raises `ConfigError`. OpenTelemetry is imported only if there is a receiver.
    """
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not url or is_disabled or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    _check_url(url)
    for name in _PROTOCOLS:
        if (protocol := environment.get(name, "grpc")) != "grpc":
            raise ConfigError(
                f"{name} is {protocol}; the server sends traces by gRPC only: unset it, or set it to grpc"
            )
    try:
        from fedplat_server.tracing.provider import Tracing
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--traces needs the Python package {exc.name}; install it with {install_command('otel')}, or "
            f"leave out --traces (and unset {' and '.join(VARIABLES)})"
        ) from exc
    try:
        return Tracing.open(url)
    except ValueError as exc:  # such as OTEL_EXPORTER_OTLP_TIMEOUT=soon
        raise ConfigError(f"a variable OTEL_... is not valid ({exc}); correct it, or unset it") from exc


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is not a number
        raise ConfigError("--traces: the port is not a number; expected a URL such as http://127.0.0.1:4317") from None
    if parts.username is not None or parts.password is not None:  # the text is not repeated: it has a password
        raise ConfigError("--traces has a user or a password; set OTEL_EXPORTER_OTLP_HEADERS instead")
    if not is_valid or parts.path not in ("", "/") or parts.query:
        raise ConfigError(
            f"--traces {url}: expected the URL of an OTLP/gRPC receiver, such as http://127.0.0.1:4317 or "
            "https://collector.example:4317"
        )
