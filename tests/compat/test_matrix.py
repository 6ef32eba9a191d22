"""Clients, commands, gateways and leaders of this version and of the last release, in all pairs that may meet."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from compat import adding
from fedplat import __version__
from support import releases, shared_daemons
from support.releases import MAIN

pytestmark = [pytest.mark.slow, pytest.mark.fault("F28")]
ROUNDS = 3
DIGEST = adding.digest_of(adding.expected_model(ROUNDS))
LARGE_DIGEST = adding.digest_of(adding.expected_model(ROUNDS, adding.LARGE))


def test_the_programs_of_a_release_are_those_of_its_wheels(release: releases.Release) -> None:
    assert {version for _, version in releases.modules(release).values()} == {release.name}
    assert {version for _, version in releases.modules(MAIN).values()} == {__version__}
    assert release.name != __version__


@pytest.mark.parametrize("leader", ["main", "last"])
def test_every_pair_computes_the_same_models(
    tmp_path: Path, postgres: str, last: releases.Release, leader: str
) -> None:
    """The leader is of one version and the gateway of the other; each population has clients of one version.

    Both versions of the command submit a job for each population, through the gateway. One client of each population
    uses the gateway, the other one the leader. Updates of a further job are uploaded: those of this version's clients
    are named by their digest at a leader of the last release.
    """
    others = {"main": last, "last": MAIN}
    daemons = [MAIN if leader == "main" else last, others[leader]]
    populations = {"new": MAIN, "old": last}
    with shared_daemons.started(tmp_path / "data", postgres, daemons) as (first, second), first.admin() as admin:
        assert admin.status().software_version == (__version__ if leader == "main" else last.name)
        clients = [
            adding.start_client(
                version,
                number,
                tmp_path / f"{population}-{number}",
                adding.enroll(admin, population, [first, second][number].address),
            )
            for population, version in populations.items()
            for number in range(adding.NUM_CLIENTS)
        ]
        digests, uploaded = defaultdict[str, list[str]](list), list[tuple[int, str]]()
        with adding.stopped_at_the_end(clients):
            for cli in (MAIN, last):
                for population in populations:
                    job = adding.write_project(tmp_path / "jobs", f"{population}-{cli.name}", population, ROUNDS)
                    versions = adding.submit(cli, first.profile_path, second.address, job)
                    digests[job.stem] = [each["model"]["digest"] for each in versions]
            for population in populations:
                job = adding.write_project(tmp_path / "jobs", f"{population}-large", population, ROUNDS, adding.LARGE)
                versions = adding.submit(MAIN, first.profile_path, second.address, job)
                uploaded.append((len(versions), versions[-1]["model"]["digest"]))
        seen = {(client.population, client.software_version) for client in admin.list_clients()}
    assert seen == {("new", __version__), ("old", last.name)}
    assert len(digests) == 4
    assert {(len(each), each[-1]) for each in digests.values()} == {(ROUNDS + 1, DIGEST)}, digests
    assert uploaded == [(ROUNDS + 1, LARGE_DIGEST)] * len(populations)


@pytest.mark.parametrize("server", ["main", "last"])
def test_a_model_of_100_mb_between_two_versions(tmp_path: Path, last: releases.Release, server: str) -> None:
    """The server sends pieces of 2 MiB to any client; ids of uploads and BLAKE3 need two ends of this version."""
    daemon, client = (MAIN, last) if server == "main" else (last, MAIN)
    database = str(tmp_path / "data" / "fedplat.sqlite")
    with shared_daemons.started(tmp_path / "data", database, [daemon]) as (leader,), leader.admin() as admin:
        clients = [
            adding.start_client(
                client, number, tmp_path / f"client-{number}", adding.enroll(admin, "demo", leader.address)
            )
            for number in range(adding.NUM_CLIENTS)
        ]
        with adding.stopped_at_the_end(clients):
            job = adding.write_project(tmp_path / "jobs", "huge", "demo", 1, adding.HUGE)
            versions = adding.submit(daemon, leader.profile_path, leader.address, job)
    assert int(versions[-1]["model"]["size_bytes"]) > 4 * adding.HUGE
    assert versions[-1]["model"]["digest"] == adding.digest_of(adding.expected_huge_model())
