"""Every kind of job or attempt has its halves, by name; a kind that needs nothing of its own says so in its row."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fedplat.rounds.protocols import registry
from fedplat_server.protocols.registry import HALVES as SERVER

KINDS = {protocol.name for protocol in registry.ALL} - {protocol.name for protocol in registry.PRIVATE}


@pytest.mark.parametrize("rows", [pytest.param(SERVER, id="server")])
def test_every_kind_has_a_half(rows: Iterable[str]) -> None:
    assert set(rows) == KINDS
