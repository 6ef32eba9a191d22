"""The package of `clients/typescript`, built once for all tests that use it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.docs.blocks import ROOT

PACKAGE = ROOT / "clients/typescript"
_PATIENCE_S = 600.0


def build() -> Path:
    """Return the package with its dependencies and what is built of it; without Node, the test is skipped."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: the client in TypeScript needs Node 20 or newer")
    lock = PACKAGE / "package-lock.json"
    installed = PACKAGE / "node_modules/.package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        done = _run("npm", "ci", "--no-audit", "--no-fund", "--prefer-offline")
        if done.returncode and any(each in done.stderr for each in ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED")):
            pytest.skip("the registry of npm cannot be reached, and the packages of clients/typescript are not there")
        assert not done.returncode, done.stderr
        os.utime(installed)
    for script in ("build", "bundle"):
        done = _run("npm", "run", "--silent", script)
        assert not done.returncode, done.stdout + done.stderr
    return PACKAGE


def pack(folder: Path) -> list[str]:
    """Make the package that npm would publish; return the names of its files."""
    done = _run("npm", "pack", "--json", "--ignore-scripts", "--pack-destination", str(folder))
    assert not done.returncode, done.stderr
    return [each["path"] for each in json.loads(done.stdout)[0]["files"]]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=PACKAGE, capture_output=True, text=True, timeout=_PATIENCE_S, check=False, stdin=subprocess.DEVNULL
    )
