"""Commands of the server in this process."""

from __future__ import annotations

import signal
import sys

import pytest

from fedplat_server.cli import main


def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Runs a command that needs no daemon in this process, which is quicker: (exit status, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["fedplat-server", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main.main()
    signal.signal(signal.SIGTERM, before)
    assert isinstance(caught.value.code, int)
    out, err = capsys.readouterr()
    return caught.value.code, out, err
