"""docs/errors.md has every code and every reason, and its commands exist."""

from __future__ import annotations

import re

import errors_page
from fedplat import errors
from fedplat.rounds.states import Reason
from fedplat_server.errors import Code
from support.docs import commands


def test_the_page_is_up_to_date() -> None:
    expected = "run `python docs/site/errors_page.py`"
    assert errors_page.PAGE.read_text("utf-8") == errors_page.render(), expected


def test_each_code_and_reason_has_advice() -> None:
    assert list(errors_page.CODES) == list(Code)
    assert list(errors_page.REASONS) == list(Reason)


def test_messages_name_entries_that_are_there() -> None:
    page = errors_page.PAGE.read_text("utf-8")
    for code in Code:
        assert f"\n### `{errors.refer_to_docs(code.name)[8:-1]}`\n" in page


def test_its_commands_exist() -> None:
    named = re.findall(r"`(fedplat(?:-server|-client)? [^`]+)`", errors_page.render())
    assert len(named) > 20
    for text in named:
        for command in commands.find(text.replace("=...", "=module:function").replace("-...", "")):
            if command.rest[-1].startswith("--") or command.rest == ("job", "check", "FILE"):
                continue
            assert not commands.check(command), text
