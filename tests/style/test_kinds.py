"""Every kind of job or attempt has its halves, by name; a kind that needs nothing of its own says so in its row."""

from __future__ import annotations

from fedplat.rounds.protocols import registry
from fedplat_client._protocols.gossip.worker import SiloWorker
from fedplat_client._protocols.registry import make_halves
from fedplat_server.protocols.registry import HALVES as SERVER

KINDS = {protocol.name for protocol in registry.ALL} - {protocol.name for protocol in registry.PRIVATE}


def open_no_silos() -> SiloWorker:
    raise AssertionError("no assignment is run")


def test_every_kind_has_a_half_on_the_server() -> None:
    assert set(SERVER) == KINDS


def test_every_kind_in_which_clients_take_part_has_a_half_on_the_client() -> None:
    assert set(make_halves(open_no_silos)) == KINDS - {"warm_start"}
