"""Spans over real processes; `test_killed` has those of rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import otlp, processes


@pytest.mark.slow
def test_the_receiver_is_read_from_the_variables_of_opentelemetry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with otlp.receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=hospitals")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "fedplat-eu")
        with processes.server(tmp_path / "server") as server, server.admin() as admin:
            admin.status()
        assert receiver.headers
        assert {each["x-tenant"] for each in receiver.headers} == {"hospitals"}
        assert {name for name, _ in receiver.received()} == {"fedplat-eu"}
