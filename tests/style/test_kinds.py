"""Every kind of job or attempt has its halves, by name, and a page; one that needs nothing of its own has a row too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedplat.rounds.protocols import registry
from fedplat.simulation.protocols.registry import KINDS as SIMULATED
from fedplat_client._protocols.gossip.worker import SiloWorker
from fedplat_client._protocols.registry import make_halves
from fedplat_server.protocols.registry import HALVES as SERVER

PRIVATE = {protocol.name for protocol in registry.PRIVATE}
KINDS = {protocol.name for protocol in registry.ALL} - PRIVATE
OF_ATTEMPTS = {"evaluation", "warm_start"}
ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: ROOT / f"docs/rounds/{name.replace('_', '-')}.md" for name in sorted({*KINDS, "private"})}


def open_no_silos() -> SiloWorker:
    raise AssertionError("no assignment is run")


def test_every_kind_has_a_half_on_the_server() -> None:
    assert set(SERVER) == KINDS


def test_every_kind_in_which_clients_take_part_has_a_half_on_the_client() -> None:
    assert set(make_halves(open_no_silos)) == KINDS - {"warm_start"}


def test_every_kind_of_jobs_has_a_behaviour_in_the_simulator() -> None:
    assert set(SIMULATED) == (KINDS - OF_ATTEMPTS) | PRIVATE


@pytest.mark.parametrize("name", PAGES)
def test_every_kind_has_a_page_on_what_happens_in_a_round(name: str) -> None:
    page = PAGES[name]
    assert page.is_file(), f"write {page.relative_to(ROOT)}: what is sent, what happens at the deadline, after a crash"
    text = page.read_text("utf-8")
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    for topic in ("deadline", "After a crash", "Where it is decided"):
        assert any(topic in heading for heading in headings), f"{page.name} has no heading about: {topic}"
    paths = re.findall(r"`((?:fedplat|server|client)/[\w./]+)`", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert paths, f"{page.name} does not name the files that decide what it describes"
    assert not missing, f"{page.name} names files that do not exist: {missing}"


def test_the_table_of_kinds_links_every_page() -> None:
    rows = [line for line in (ROOT / "docs/architecture.md").read_text("utf-8").splitlines() if line.startswith("|")]
    for page in PAGES.values():
        assert sum(f"](rounds/{page.name})" in row for row in rows) == 1, f"a row of the table must link {page.name}"
