"""Programs of Debian that some tests drive."""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {
    "chromium": "chromium",
    "haproxy": "haproxy",
    "mpirun": "openmpi-bin",
    "nginx": "nginx-light",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}


def require(name: str) -> str:
    """Return the path of a program. Without it the test is skipped; in CI, which installs all of them, it fails."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    if path is None:
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(f"{name} is not installed: apt-get install --no-install-recommends {PACKAGES[name]}")
    return path
