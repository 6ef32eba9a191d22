"""Commands of the server in this process: to import their modules takes longer than most of them."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedplat_server.cli import init as init_command
from fedplat_server.cli import main
from fedplat_server.storage.data_dir import PRIVATE_UMASK


def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Runs a command that needs no daemon: (exit status, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["fedplat-server", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main.main()
    signal.signal(signal.SIGTERM, before)
    assert isinstance(caught.value.code, int)
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def init(folder: Path, port: int = 7443, database: str | None = None) -> str:
    """`fedplat-server init` for a server on loopback; returns what it prints."""
    before, printed = os.umask(PRIVATE_UMASK), io.StringIO()
    try:
        # In a thread, since the command has an event loop of its own, and a test may run in one.
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), ThreadPoolExecutor(1) as thread:
            thread.submit(init_command.init, ["127.0.0.1"], port, None, folder, database).result()
    finally:
        os.umask(before)
    return printed.getvalue()
