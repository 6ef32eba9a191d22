"""The built distributions work without the repository, from empty environments to the end of the digits demo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.projects import CORE, ROOT, require_index

PROGRAM = [sys.executable, str(ROOT / "tests" / "distributions" / "run.py")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheels_work_in_empty_environments(tmp_path: Path) -> None:
    """What `make dist` does, into another folder."""
    require_index(tmp_path)
    command = [*PROGRAM, "--output", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DEMO OK " in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"DIST OK version={CORE.version} ")
    assert len(list((tmp_path / "dist").glob("fedplat*"))) == 6


def test_a_tag_of_another_version_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([*PROGRAM, "--tag", "v9.9.9"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"the tag is v9.9.9, and the version {CORE.version}; expected the tag v{CORE.version}" in done.stderr
