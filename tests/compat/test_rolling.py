"""Three daemons of the last release are replaced one by one in the middle of rounds, and some go back.

The clients are of both versions. The next release is this version with a step of the schema that adds columns to every
table that a round writes to, whether or not this version has such a step itself.

By hand with more clients and other moments: `CLIENTS=200 SEED=7 pytest tests/compat/test_rolling.py -m slow -s`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedplat import __version__
from fedplat.admin import AdminClient, submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from support import migrations, process_logs, processes, releases, shared_daemons
from support.jobs import write_job
from support.releases import MAIN
from support.shared_daemons import Daemon

pytestmark = [pytest.mark.slow, pytest.mark.fault("F28", "F29"), pytest.mark.timeout(600)]
HERE = Path(__file__).parent
NUM_CLIENTS = int(os.environ.get("CLIENTS", "50"))
SEED = int(os.environ.get("SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
ROUNDS = 8
GOAL = NUM_CLIENTS * 4 // 5
JOB = write_job(
    "rolling",
    population="many",
    trainer="add",
    rounds=ROUNDS,
    selection={"goal": GOAL, "min_fraction": 1.0},
    deadlines={"heartbeat_s": 1.0, "selection_s": 120.0, "training_s": 600.0},
    retry={"base_s": 0.1},
)


class Fleet:
    """A process with many clients of one version."""

    def __init__(self, release: releases.Release, folder: Path, ticket: str, count: int, gate: Path) -> None:
        folder.mkdir()
        path = folder / "ticket"
        path.write_text(ticket)
        arguments = [HERE / "fleet.py", path, folder, count, gate]
        command = release.command("python", "-P", *map(str, arguments))
        with process_logs.open_log(folder / "log") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=releases.environment(OMP_NUM_THREADS="1")
            )

    def stop(self) -> dict[str, object]:
        """Stop the clients; what they did."""
        self.process.terminate()
        out, _ = self.process.communicate(timeout=processes.PATIENCE_S)
        return json.loads(out)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


class Gate:
    """The file that keeps rounds after some round open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open(1)

    def open(self, last_round: int) -> None:
        self.last_round = last_round
        new = self.path.with_suffix(".new")
        new.write_text(str(last_round))
        new.replace(self.path)


class Upgrade:
    """What an operator does during the job, each at a random moment of a round."""

    def __init__(self, admin: Callable[[], AdminClient], job: str, gate: Gate) -> None:
        self._admin = admin
        self._job = job
        self._gate = gate
        self._dice = random.Random(SEED)

    def at_some_moment(self, what: str, act: Callable[[], None]) -> None:
        """Wait for a random number of reports in the next round, and act; the round ends meanwhile, or only then."""
        wanted = self._gate.last_round + 1, self._dice.randrange(GOAL // 2)
        with self._admin() as admin:

            def reached() -> bool:
                job = admin.show_job(self._job)
                assert job.status == admin_pb2.JOB_STATUS_RUNNING, job
                return (job.current.round, job.current.reported) >= wanted

            processes.until(reached, f"round {wanted[0]} with {wanted[1]} reports")
            now = admin.show_job(self._job).current
        ends_meanwhile = self._dice.random() < 0.5
        print(f"{what} in round {now.round} after {now.reported} reports" + ", which ends meanwhile" * ends_meanwhile)
        if ends_meanwhile:
            self._gate.open(wanted[0])
        act()
        self._gate.open(wanted[0])


def test_daemons_are_replaced_during_a_job(tmp_path: Path, empty_postgres: str, last: releases.Release) -> None:
    print(f"SEED={SEED} CLIENTS={NUM_CLIENTS}")
    steps = tmp_path / "steps"
    head = migrations.write_step(steps, migrations.EXPANDS)
    new = releases.Release("next", MAIN.bin, ("python", "-P", str(HERE / "next_release.py"), str(steps)))
    last.run("fedplat-server", "db", "upgrade", "--data-dir", str(tmp_path), "--database", empty_postgres)
    fleets: list[Fleet] = []
    gate = Gate(tmp_path / "gate")
    with shared_daemons.started(tmp_path / "data", empty_postgres, [last] * 3) as daemons:
        leader, second, third = daemons
        try:
            with leader.admin() as admin:
                addresses = second.address, third.address
                for number, (version, address) in enumerate(zip((last, MAIN), addresses, strict=True)):
                    count = NUM_CLIENTS // 2
                    ticket = admin.create_enrollment("many", count, 3600.0, address).ticket
                    fleets.append(Fleet(version, tmp_path / f"fleet-{number}", ticket, count, gate.path))
                model = Parameters.from_arrays({"weight": np.zeros(16, np.float32)})
                job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model)).job_id
            _upgrade(Upgrade(leader.admin, job, gate), daemons, empty_postgres, (last, new, head))
            gate.open(ROUNDS)
            with second.admin() as admin:
                ended = (admin_pb2.JOB_STATUS_COMPLETED, admin_pb2.JOB_STATUS_FAILED, admin_pb2.JOB_STATUS_PAUSED)
                processes.until(lambda: admin.show_job(job).status in ended, "the job's end", 3 * processes.PATIENCE_S)
                done = [fleet.stop() for fleet in fleets]
                _check_job(admin, job, tmp_path / "final.safetensors")
        finally:
            for fleet in fleets:
                fleet.end()
    assert {each["version"] for each in done} == {last.name, __version__}
    assert [each["errors"] for each in done] == [[], []]
    assert sum(int(str(each["trained"])) for each in done) == ROUNDS * GOAL
    where = ["--data-dir", str(tmp_path / "data"), "--database", empty_postgres]
    new.run("fedplat-server", "verify", *where)
    last.run("fedplat-server", "verify", *where)


def _upgrade(
    upgrade: Upgrade, daemons: list[Daemon], database: str, versions: tuple[releases.Release, releases.Release, str]
) -> None:
    """The steps of docs/upgrading.md, with two detours to the last release."""
    leader, second, third = daemons
    last, new, head = versions
    where = ["--data-dir", str(leader.profile_path.parent), "--database", database]

    def upgrade_database() -> None:
        assert head in new.run("fedplat-server", "db", "upgrade", *where)
        assert head in last.run("fedplat-server", "db", "upgrade", *where)  # has nothing to do

    upgrade.at_some_moment("the database is upgraded", upgrade_database)
    upgrade.at_some_moment("a gateway of the last release is restarted", lambda: third.replace(last))
    upgrade.at_some_moment("a gateway is replaced", lambda: second.replace(new))
    upgrade.at_some_moment("a gateway is replaced", lambda: third.replace(new))
    upgrade.at_some_moment("the leader is replaced", lambda: leader.replace(new))
    upgrade.at_some_moment("a daemon goes back", lambda: second.replace(last))


def _check_job(admin: AdminClient, job: str, path: Path) -> None:
    """Every accepted report is in a version, no attempt was abandoned, and the model is right."""
    assert admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED
    attempts = admin.list_rounds(job, all_attempts=True)
    assert [(each.round, each.attempt, each.merged) for each in attempts] == [
        (number, 1, GOAL) for number in range(1, ROUNDS + 1)
    ]
    states = Counter(each.state for each in admin.iter_assignments(job=job))
    assert states == {"MERGED": ROUNDS * GOAL}, states
    admin.export_model(job, None, path)
    np.testing.assert_array_equal(Parameters.open(path)["weight"], ROUNDS)
