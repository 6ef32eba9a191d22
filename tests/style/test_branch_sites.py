"""The places that ask for the kind of a job become fewer: `python -m support.branch_sites --list` shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import branch_sites

NUM_SITES, NUM_FILES = 15, 10
"""How many there are. Both only ever go down, each commit writes the new ones here."""
KINDS = "if job.kind is AttemptKind.TRAIN: pass\nif kind not in (AttemptKind.TRAIN, other): pass"


def test_no_place_asks_anew_for_the_kind_of_a_job() -> None:
    sites = branch_sites.find_sites()
    found = len(sites), len({site.path for site in sites})
    assert found <= (NUM_SITES, found[1]), (
        f"{found[0]} places ask for the kind of a job, and {NUM_SITES} did; move what differs into the object of the "
        "kind (PYTHONPATH=tests python -m support.branch_sites --list shows all places)"
    )
    assert found == (NUM_SITES, NUM_FILES), (
        f"{found[0]} places in {found[1]} files ask for the kind of a job: write {found[0]}, {found[1]} into NUM_SITES "
        f"and NUM_FILES in tests/style/{Path(__file__).name}, so that there are never more again"
    )


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("if job.spec.gossip is not None: pass", [1]),
        ("x = None is spec.flower\ny = exchange is None", [1, 2]),
        ("a = secure_messages is None\nb = spec.gossip == other\nc = spec.goal is None", []),
        (KINDS, [1, 2]),
        ("x = kind == states.AttemptKind.TRAIN", [1]),
        ("is_secure(spec) or coordinator.hides_sample(spec)", [1, 1]),
        ("if attempt.secure: pass\nx = 1 if spec.privacy else 2\nif not spec.privacy: pass", [1, 2]),
        ("x = job.fills_cohort\njob.fills_cohort = x", [1]),
    ],
)
def test_what_is_counted(text: str, lines: list[int]) -> None:
    assert sorted(branch_sites.find_lines(text)) == lines


def test_the_files_of_kinds_may_ask(tmp_path: Path) -> None:
    paths = [
        *("fedplat/rounds/protocols/gossip.py", "fedplat/job/checks.py", "server/fedplat_server/protocols/base.py"),
        *("fedplat/wire/v1/fleet_pb2.py", "fedplat/rounds/dispatch.py", "tests/test_a.py"),
    ]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("if job.spec.gossip is None: pass")
    assert branch_sites.find_sites(tmp_path) == [branch_sites.Site("fedplat/rounds/dispatch.py", 1)]
