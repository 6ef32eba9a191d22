"""The skills in `skills/`, and the commands in the sentences of these and of docs/faq.md, which the programs accept.

Their blocks are checked like those of all pages (tests/style/blocks.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from support.docs import commands
from support.docs.blocks import ROOT

SKILLS = sorted((ROOT / "skills").glob("*/SKILL.md"))
PAGES = [*SKILLS, ROOT / "docs" / "faq.md"]


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_a_skill_says_what_it_is_for(path: Path) -> None:
    _, head, text = path.read_text("utf-8").split("---\n", 2)
    described = yaml.safe_load(head)
    assert described.keys() == {"name", "description"}
    assert described["name"] == path.parent.name
    assert "Use when" in described["description"]
    assert len(described["description"]) < 1024
    assert len(text.splitlines()) < 100


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.name)
def test_the_commands_of_its_sentences_exist(path: Path) -> None:
    named = re.findall(r"`(fedplat(?:-server|-client)? [^`]+)`", path.read_text("utf-8"))
    assert named
    for text in named:
        for command in commands.find(text.replace("\n", " ")):
            assert not commands.check(command), text
