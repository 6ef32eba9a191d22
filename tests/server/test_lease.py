"""Who leads: the rules, how a daemon notices that it no longer leads, and network partitions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from sqlalchemy.engine import make_url

from faults import proxy
from fedplat_server.config import LeaseTimes
from fedplat_server.database import engine
from fedplat_server.database.engine import async_url, create_engine
from fedplat_server.database.store import LeaseStore, open_leases
from fedplat_server.errors import Code, LeadershipLostError, RefusedError, StoreUnavailableError
from fedplat_server.leadership import NO_DATABASE, LeaseElection
from fedplat_server.records import lease as rules
from fedplat_server.records.lease import Candidate, HeldLease, Lease, LeaseReading
from fedplat_server.rpc.router import Router
from support import daemons, databases
from support.daemons import digest_of, initial_model, update_of
from support.gateways import both_agree, code_of, leading
from support.jobs import job_file

ONE, TWO = Candidate("d-one", "one:7443"), Candidate("d-two", "two:7443")
TIMES = LeaseTimes(valid_s=6.0, renew_s=2.0, margin_s=1.0, poll_s=0.5)
HELD = Lease("d-one", "one:7443", 4, "secret", renewed_unix_s=1000.0, expires_unix_s=1006.0)


@pytest.mark.parametrize(
    ("now", "candidate", "free"),
    [
        (1000.0, TWO, False),
        (1005.9, TWO, False),
        (1006.0, TWO, True),
        (1000.0, ONE, True),  # its own lease, which it has forgotten
        (999.0, TWO, False),  # clocks are set back a little all the time
        (993.9, TWO, True),  # set back by more than a lease's time, and no daemon has renewed since
        (1000.0 + 86_400.0, TWO, True),
    ],
)
@pytest.mark.fault("F18")
def test_when_a_lease_is_free(now: float, candidate: Candidate, free: bool) -> None:
    assert rules.is_free(LeaseReading(HELD, now), candidate, TIMES.valid_s) is free


def test_the_first_term_and_the_next() -> None:
    assert rules.is_free(LeaseReading(None, 5.0), TWO, 6.0)
    assert rules.take_lease(LeaseReading(None, 5.0), TWO, "s", 6.0) == Lease("d-two", "two:7443", 1, "s", 5.0, 11.0)
    assert rules.take_lease(LeaseReading(HELD, 1007.0), TWO, "s", 6.0).term == 5


def test_the_holder_counts_a_shorter_time_from_its_question_on() -> None:
    held_lease = HeldLease.since(HELD, 100.0, TIMES)
    assert (held_lease.next_renewal(TIMES), held_lease.is_over(104.9), held_lease.is_over(105.0)) == (
        102.0,
        False,
        True,
    )
    assert held_lease.renew(103.0, TIMES).ends_at == 108.0


def test_no_secret_in_a_repr() -> None:
    assert "secret" not in repr(HELD).replace("secret=", "")


@pytest.fixture
def database(tmp_path: Path) -> str:
    """The URL of a SQLite database with the tables of this version."""
    return databases.create_sqlite(tmp_path / "fedplat.sqlite")


QUICK = LeaseTimes(valid_s=0.3, renew_s=0.05, margin_s=0.1, poll_s=0.01)


class Away(LeaseStore):
    """Leases in a database in which renewals fail at once, or never return."""

    def __init__(self, database: str, answers: bool) -> None:
        super().__init__(create_engine(async_url(database)))
        self._answers = answers

    async def renew(self, lease: Lease, valid_s: float) -> bool:
        if not self._answers:
            await asyncio.get_running_loop().create_future()
        raise StoreUnavailableError("away, says the test")


async def unfollowed(_: Lease) -> None:
    raise AssertionError("no other daemon leads")


@pytest.mark.fault("F19")
@pytest.mark.parametrize("answers", [True, False])
async def test_who_cannot_renew_stops_before_the_lease_ends(database: str, answers: bool) -> None:
    leases = Away(database, answers)
    election = LeaseElection(leases, ONE, QUICK)
    held_lease = await election.elect(unfollowed)
    with pytest.raises(LeadershipLostError, match="in time"):
        await election.keep(held_lease)
    await election.close()


@pytest.mark.fault("F20")
async def test_who_finds_another_term_stops_at_once(database: str) -> None:
    leases = await open_leases(database)
    election = LeaseElection(leases, ONE, LeaseTimes(valid_s=60.0, renew_s=0.01, margin_s=1.0, poll_s=0.01))
    held_lease = await election.elect(unfollowed)
    await leases.release(held_lease.lease)
    assert await leases.acquire(TWO, "s2", 60.0)
    with pytest.raises(LeadershipLostError, match="term 1 is over"):
        await election.keep(held_lease)
    await election.close()


async def test_a_candidate_follows_until_the_leader_resigns(database: str) -> None:
    leases = await open_leases(database)
    times = LeaseTimes(valid_s=60.0, renew_s=0.01, margin_s=1.0, poll_s=0.01)
    first, second = LeaseElection(leases, ONE, times), LeaseElection(leases, TWO, times)
    held_lease = await first.elect(unfollowed)
    followed: asyncio.Queue[Lease] = asyncio.Queue()
    electing = asyncio.create_task(second.elect(followed.put))
    assert (await followed.get()).address == "one:7443"
    await first.resign(held_lease)
    assert (await electing).lease.term == 2
    await leases.close()


class Contested(LeaseStore):
    """Leases in a database that another candidate takes between the reading and the first attempt to take it."""

    num_lost = 1

    async def acquire(self, candidate: Candidate, secret: str, valid_s: float) -> Lease | None:
        if self.num_lost:
            self.num_lost -= 1
            return None
        return await super().acquire(candidate, secret, valid_s)


@pytest.mark.fault("F20")
async def test_a_candidate_that_comes_too_late_tries_again(database: str) -> None:
    leases = Contested(create_engine(async_url(database)))
    election = LeaseElection(leases, ONE, QUICK)
    assert (await election.elect(unfollowed)).lease.holder == "d-one"
    assert leases.num_lost == 0
    await election.close()


class Down(LeaseStore):
    """Leases in a database that does not answer until `back` is set."""

    def __init__(self, database: str) -> None:
        super().__init__(create_engine(async_url(database)))
        self.back, self.asked = asyncio.Event(), asyncio.Event()

    async def read(self) -> LeaseReading:
        self.asked.set()
        if not self.back.is_set():
            raise StoreUnavailableError("connection refused, says the test")
        return await super().read()


async def test_callers_are_told_that_the_database_is_down(database: str) -> None:
    leases = Down(database)
    election, router = LeaseElection(leases, ONE, QUICK), Router(["a.Service"])
    router.explain = lambda: election.problem
    assert await refusal_of(router) == Code.NO_LEADER.message
    electing = asyncio.create_task(election.elect(unfollowed))
    await leases.asked.wait()
    assert await refusal_of(router) == f"{Code.NO_LEADER.message}: {NO_DATABASE}"
    leases.back.set()
    assert (await electing).lease.holder == "d-one"
    assert election.problem == ""
    await election.close()


async def refusal_of(router: Router) -> str:
    """Return why a call is refused without a leader."""
    details: Any = SimpleNamespace(method="/a.Service/Call")
    handler: Any = router.route.handler(details)
    with pytest.raises(RefusedError) as caught:
        await anext(handler.stream_stream(None, None))
    return str(caught.value)


# --- networks between a leader and its database --------------------------------------------------------------


def behind(database: str) -> str:
    """Where a PostgreSQL listens: `host:port`, or the path of its socket."""
    url = make_url(database)
    folder, port = url.query.get("host"), url.port or 5432
    return f"{folder}/.s.PGSQL.{port}" if folder else f"{url.host}:{port}"


def through(database: str, address: str) -> str:
    """The URL of the same database, through a proxy."""
    host, port = proxy.split(address)
    url = make_url(database).difference_update_query(["host"]).set(host=host, port=port)
    return url.render_as_string(hide_password=False)


@pytest.mark.slow
@pytest.mark.fault("F19", "F20")
@pytest.mark.parametrize(
    "weather", [proxy.BLACKHOLE, proxy.ONLY_TO_SERVER, proxy.ONLY_TO_CLIENT], ids=["both", "unheard", "deaf"]
)
async def test_a_leader_that_is_cut_off_from_the_database_stops_leading(
    tmp_path: Path, postgres: str, weather: proxy.Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new daemon leads; nothing that the old one still wrote counts, and it becomes a gateway when it is back.

    The old daemon has ten seconds for a renewal, which is long enough on a busy machine, and the new one a minute. A
    transaction of the old one that was cut off keeps its lock on the lease until PostgreSQL ends it.
    """
    monkeypatch.setattr(engine, "ABANDONED_S", 15)
    short = LeaseTimes(valid_s=12.0, renew_s=0.2, margin_s=2.0, poll_s=0.05)
    long = LeaseTimes(valid_s=60.0, renew_s=0.2, margin_s=2.0, poll_s=0.05)
    async with (
        proxy.running(behind(postgres)) as network,
        daemons.running(tmp_path, database=through(postgres, network.address), lease=short) as old,
        daemons.running(tmp_path, database=postgres, lease=long) as new,
    ):
        job = await new.operator.start(job_file(goal=1))
        client = await new.enroll()
        token = (await client.assignment()).token
        update = update_of(initial_model(), 1).to_bytes()
        network.set(weather)
        there = client.over(old.channel)
        late = asyncio.ensure_future(code_of(there.report_inline(token, update)))
        await leading(new, 2)
        assert (await late)[0] is grpc.StatusCode.UNAVAILABLE
        code, _, ours = await code_of(old.operator.show(job))
        assert (code, ours) == (grpc.StatusCode.UNAVAILABLE, "NO_LEADER")
        await client.open_session()  # the new leader does not know the old leader's session
        answer = await client.report_inline(token, update)
        if not answer.HasField("receipt"):  # the attempt was lost with its leader; there is another one
            token = (await client.assignment()).token
            assert (await client.report_inline(token, update)).HasField("receipt")
        await new.operator.until(job, "job", "COMPLETED")
        network.set(proxy.CLEAR)
        first, second = await both_agree(old, new)
        assert first.leader == second.leader
        assert first.term == 2
        versions = await old.operator.versions(job)
        assert [one.model.version for one in versions] == [0, 1]
        assert versions[1].num_updates == 1
        assert digest_of(await old.operator.export(job)) == versions[1].model.digest
