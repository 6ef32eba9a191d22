"""What an error message advises to install: packages that an index has, in the environment of the program."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from fedplat.extras import install_command
from support import processes

REQUIRES = {
    "fedplat": [
        "numpy>=2",
        "pyarrow>=24; extra == 'tables'",
        "torch>=2.9 ; extra == 'torch'",
        "x>1; extra == 'tablesx'",
    ],
    "fedplat-client": ["fedplat==1.0", 'fedplat[torch,tables]==1.0; extra == "both"', "torch>=2.9; extra == 'both'"],
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", REQUIRES.__getitem__)


def test_packages_of_an_extra_are_named() -> None:
    assert install_command("tables") == "pip install 'pyarrow>=24'"
    assert install_command("both", "fedplat-client") == "pip install 'torch>=2.9' 'pyarrow>=24'"
    assert install_command("unknown") == "pip install 'fedplat[unknown]'"


def test_tools_of_pipx_and_environments_of_uv_have_commands_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "venvs" / "fedplat-server"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType]
        assert install_command("tables") == f"uv pip install --python {folder}/bin/python 'pyarrow>=24'"
    (folder / "pipx_metadata.json").touch()
    assert install_command("tables") == "pipx inject fedplat-server 'pyarrow>=24'"


def test_no_message_names_a_distribution_that_an_index_does_not_have() -> None:
    for folder in ("fedplat", "client/fedplat_client", "server/fedplat_server"):
        for path in (processes.ROOT / folder).rglob("*.py"):
            found = re.findall(r"install[^\n]*fedplat(?:-client|-server)?\[\w", path.read_text())
            assert not found, path
