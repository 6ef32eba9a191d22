"""docs/site/project_address.py writes one address into all files that name it, and changes nothing else."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

import project_address
from support.docs.blocks import ROOT

FILES = (*project_address.PROJECTS, "CITATION.cff")


def test_the_address_is_written_once(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for host in ("old.example.org", "code.example.org"):
        project_address.write(tmp_path, f"https://{host}/fedplat/", "https://docs.example.org")
    for name in project_address.PROJECTS:
        before, after = tomllib.loads((ROOT / name).read_text()), tomllib.loads((tmp_path / name).read_text())
        urls = after["project"].pop("urls")
        assert urls["Source"] == "https://code.example.org/fedplat"
        assert urls["Documentation"] == "https://docs.example.org"
        before["project"].pop("urls", None)
        assert after == before
    citation = yaml.safe_load((tmp_path / "CITATION.cff").read_text())
    assert citation["repository-code"] == "https://code.example.org/fedplat"


@pytest.mark.parametrize("address", ["code.example.org", "http://code.example.org", 'https://code.example.org/"'])
def test_what_is_no_address_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected https://HOST/PATH"):
        project_address.write(tmp_path, address, "https://docs.example.org")
