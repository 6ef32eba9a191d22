"""Plugins that an operator names: their jobs, their failures, and what becomes of a job whose plugin has changed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat.codecs.container import Format, options_from_text
from fedplat.config.loaded_plugins import LoadedPlugins, load_plugins
from fedplat.config.plugins import kinds
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from fedplat_server.config import LeaseTimes
from fedplat_server.verify.inspection import verify
from support import commands, daemons, gateways, plugins
from support.daemons import RawClient, Site, initial_model, reason_name, update_of
from support.jobs import job_file

pytestmark = [pytest.mark.calm, pytest.mark.slow]
RULE = '[aggregation]\nrule = "scaled"\nfactor = 3.0\n'
CODEC = '[compression]\nuplink = { codec = "halves" }\n'
RETRY = "[retry]\nbase_s = 0.01\nmax_s = 0.01\nmax_attempts = 2\n"
CODECS = ("halves", "late")
PAUSED, RUNNING = admin_pb2.JOB_STATUS_PAUSED, admin_pb2.JOB_STATUS_RUNNING


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedPlugins:
    return plugins.load(plugins.write_file(tmp_path))


async def deliver(client: RawClient, update: Parameters, table: LoadedPlugins) -> str:
    """Work for one assignment; the reason why the update is refused, or ""."""
    one = await client.assignment(codecs=CODECS)
    answer = await client.report_inline(one.token, encode(one, update, table))
    return answer.refusal.text if answer.HasField("refusal") else ""


def encode(one: fleet_pb2.Assignment, update: Parameters, table: LoadedPlugins) -> bytes:
    """The bytes that a client sends for an assignment."""
    if not one.uplink:
        return update.to_bytes()
    format = Format(options_from_text(one.uplink, table.table), update.schema)
    return b"".join(format.encode(update, np.random.default_rng(1)))


async def train(clients: list[RawClient], table: LoadedPlugins, round_: int) -> None:
    updates = [update_of(initial_model(), 10 * round_ + number) for number in range(len(clients))]
    work = (deliver(client, update, table) for client, update in zip(clients, updates, strict=True))
    assert set(await asyncio.gather(*work)) == {""}


def expected(rounds: int, factor: float = 3.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The model of two clients after some rounds, computed from their updates in half precision."""
    model = initial_model().to_vector()
    last = np.zeros_like(model)
    for round_ in range(1, rounds + 1):
        updates = [update_of(initial_model(), 10 * round_ + number).to_vector() for number in range(2)]
        mean = np.mean([update.astype("f2").astype("f4") for update in updates], axis=0)
        last = factor * mean + last
        model = model + last
    return model


async def test_a_job_with_a_rule_and_a_codec_of_plugins(folder: Path, loaded: LoadedPlugins) -> None:
    text = job_file(rounds=2, more=RULE + CODEC)
    async with daemons.running(folder, plugins=loaded) as site:
        job, clients = await site.operator.start(text), await site.fleet(2)
        for round_ in (1, 2):
            await train(clients, loaded, round_)
            await site.operator.until(job, "attempt", "COMMITTED", round_)
        await site.operator.until(job, "job", "COMPLETED")
        np.testing.assert_allclose((await site.operator.model(job)).to_vector(), expected(2), rtol=1e-5)
        status, shown = await site.status(), await site.operator.show(job)
        assert [f"{each.kind}.{each.name}" for each in status.plugins] == sorted(plugins.NAMES)
        assert [each.name for each in shown.plugins] == ["halves", "scaled"]
        assert {each.digest for each in shown.plugins} == {version.digest for version in loaded.versions}
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    assert not report.findings


async def test_the_policy_of_a_plugin_draws(folder: Path, loaded: LoadedPlugins) -> None:
    text = job_file(goal=1, wait_for=3, sampling={"policy": "labelled"})
    async with daemons.running(folder, plugins=loaded) as site:
        await site.operator.start(text)
        clients = await site.fleet(3)
        polls = [asyncio.ensure_future(client.check_in()) for client in clients[:2]]
        await site.waiting(2)
        assert (await clients[2].assignment(labels={"first": "yes"})).round == 1
        assert not any(poll.done() for poll in polls)
        assert (await site.status()).num_waiting == 2
        for poll in polls:
            poll.cancel()


async def test_a_client_without_the_codec_is_not_drawn_and_the_operator_sees_why(
    folder: Path, loaded: LoadedPlugins
) -> None:
    more = CODEC + "[deadlines]\nselection_s = 0.05\n[retry]\nbase_s = 600.0\nmax_s = 600.0\n"
    async with daemons.running(folder, plugins=loaded) as site:
        client = await site.enroll()
        poll = asyncio.ensure_future(client.check_in(600.0, codecs=("bf16",)))
        await site.waiting(1)
        job = await site.operator.start(job_file(goal=1, more=more))
        await site.operator.until(job, "attempt", "ABANDONED")
        assert "; 1 more do not have codecs.halves; retrying" in (await site.operator.show(job)).reason
        poll.cancel()
        refusal = await client.refusal(codecs=("bf16",))
        assert "codecs" in refusal.text


ALGORITHM = """
from msgspec import Struct

class Mine(Struct, frozen=True):
    def build(self):
        raise KeyError("only clients build it")
"""


@pytest.mark.skipif("algorithms" not in kinds(), reason="local algorithms are no kind yet")
async def test_a_job_draws_only_clients_with_its_algorithm(folder: Path) -> None:
    (folder / "algorithm.py").write_text(ALGORITHM)
    table = load_plugins({"algorithms.mine": f"{folder / 'algorithm.py'}:Mine"})
    async with daemons.running(folder, plugins=table) as site:
        own = await site.operator.start(job_file("own", goal=1, more='[config]\nalgorithm = "mine"\n'))
        custom = await site.operator.create(job_file("custom", more='[config]\nalgorithm = "of my trainer"\n'))
        assert [plugin.kind for plugin in (await site.operator.show(own)).plugins] == ["algorithms"]
        assert not custom.plugins
        client = await site.enroll()
        poll = asyncio.ensure_future(client.check_in(algorithms=("other",)))
        await site.waiting(1)
        with_it = await site.enroll()
        assert (await with_it.assignment(algorithms=("mine",))).job_id == own
        assert not poll.done()
        poll.cancel()


@pytest.mark.fault("F51")
async def test_a_server_without_the_plugin_pauses_only_the_job_that_needs_it(
    folder: Path, loaded: LoadedPlugins
) -> None:
    text = job_file(rounds=2, more=RULE + CODEC)
    async with daemons.running(folder, plugins=loaded) as site:
        job = await site.operator.start(text)
        one, two = await site.fleet(2)
        await train([one, two], loaded, 1)
        await site.operator.until(job, "attempt", "COMMITTED", 1)
        work = (deliver(one, update_of(initial_model(), 20), loaded), two.assignment(codecs=("halves",)))
        await asyncio.gather(*work)  # the second round collects
    async with daemons.running(folder) as site:
        shown = await site.operator.show(job)
        assert shown.status == PAUSED
        assert shown.reason.startswith("the server has no plugin codecs.halves (the job has sha256 ")
        assert shown.reason.endswith("); start it with --plugin codecs.halves=..., then resume the job")
        assert shown.current.reason == shown.reason
        with pytest.raises(aio.AioRpcError, match="cannot resume: the server has no plugin") as caught:
            await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        other = await site.operator.start(job_file("other", goal=1))
        client = await site.enroll()
        assert await deliver(client, update_of(initial_model(), 1), loaded) == ""
        await site.operator.until(other, "job", "COMPLETED")
        report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder, live=True)
        assert not report.findings
    async with daemons.running(folder, plugins=loaded) as site:
        assert (await site.operator.show(job)).status == PAUSED
        assert (await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job))).status == RUNNING
        await train(await site.fleet(2), loaded, 2)
        await site.operator.until(job, "job", "COMPLETED")
        np.testing.assert_allclose((await site.operator.model(job)).to_vector(), expected(2), rtol=1e-5)


@pytest.mark.fault("F51")
async def test_a_job_continues_with_another_version_only_if_it_is_resumed(folder: Path, loaded: LoadedPlugins) -> None:
    async with daemons.running(folder, plugins=loaded) as site:
        job = await site.operator.start(job_file(rounds=2, goal=1, more=RULE))
        draft = (await site.operator.create(job_file("draft", goal=1, more=RULE))).job_id
    changed = plugins.load(plugins.write_file(folder, "# changed\n", "changed.py"))
    before, after = (
        next(version for version in each.versions if version.kind == "rules").short for each in (loaded, changed)
    )
    async with daemons.running(folder, plugins=changed) as site:
        shown = await site.operator.show(job)
        assert shown.status == PAUSED
        assert f"the job has rules.scaled {before}, but the server has rules.scaled {after}; start" in shown.reason
        resumed = await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job))
        assert (resumed.status, resumed.reason) == (RUNNING, "")
        assert {each.digest for each in resumed.plugins} == {changed.versions[0].digest}
        assert (await site.operator.jobs.StartJob(admin_pb2.JobRequest(job=draft))).status == RUNNING
    async with daemons.running(folder, plugins=changed) as site:
        assert (await site.operator.show(job)).status == RUNNING
        assert (await site.operator.show(draft)).status == RUNNING


@pytest.mark.slow
@pytest.mark.fault("F51")
async def test_a_daemon_without_the_plugin_that_takes_over_pauses_the_job(
    folder: Path, postgres: str, loaded: LoadedPlugins
) -> None:
    settings: dict[str, Any] = {"database": postgres, "lease": LeaseTimes(valid_s=60.0, renew_s=0.2, poll_s=0.05)}
    async with contextlib.AsyncExitStack() as stack:
        leader = await stack.enter_async_context(daemons.running(folder, plugins=loaded, **settings))
        job = await leader.operator.start(job_file(goal=1, more=RULE))
        async with daemons.running(folder, **settings) as other:
            assert (await other.operator.show(job)).status == RUNNING, "it passes the call on"
            await stack.aclose()
            await gateways.leading(other, 2)
            shown = await other.operator.show(job)
            assert shown.status == PAUSED
            assert shown.reason.startswith("the server has no plugin rules.scaled")
            assert [plugin.name for plugin in shown.plugins] == ["scaled"]


@pytest.mark.fault("F51")
async def test_a_job_whose_options_no_longer_fit_is_paused(folder: Path, loaded: LoadedPlugins) -> None:
    async with daemons.running(folder, plugins=loaded) as site:
        job = await site.operator.start(job_file(rounds=2, goal=1, more=RULE))
    path = folder / "renamed.py"
    path.write_text(plugins.SOURCE.replace("factor", "scale"))
    async with daemons.running(folder, plugins=plugins.load(path)) as site:
        shown = await site.operator.show(job)
        assert shown.status == PAUSED
        assert "aggregation.factor = 3.0: there is no such key" in shown.reason
        with pytest.raises(aio.AioRpcError, match="cannot resume"):
            await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job))


@pytest.mark.fault("F51")
@pytest.mark.parametrize(
    ("fails", "text"),
    [
        ("raises", "the aggregation with rules.scaled raised KeyError: 'momentum'"),
        ("short", "the aggregation rule returned float32[1] for a step or a state; expected float32[8]"),
        ("nan", "not finite"),
    ],
)
async def test_a_rule_that_fails_costs_its_attempt(folder: Path, loaded: LoadedPlugins, fails: str, text: str) -> None:
    more = f'[aggregation]\nrule = "scaled"\nfails = "{fails}"\n' + RETRY
    async with daemons.running(folder, plugins=loaded) as site:
        job, client = await site.operator.start(job_file(goal=1, more=more)), await site.enroll()
        for _ in range(2):
            assert await deliver(client, update_of(initial_model(), 1), loaded) == ""
        await site.operator.until(job, "job", "FAILED")
        shown = await site.operator.show(job)
        assert "aggregation failed: " in shown.reason
        assert text in shown.reason
        assert "\n" not in shown.reason
        await completes(site, client, loaded)


@pytest.mark.fault("F51")
@pytest.mark.parametrize(
    ("fails", "text"),
    [
        ("raises", "the sampling policy \"labelled\": draw() raised KeyError: 'utility'"),
        ("twice", 'the sampling policy "labelled" drew [0, 0] from 1 candidates'),
        ("endless", 'the sampling policy "labelled" drew [0, 1] from 1 candidates'),
    ],
)
async def test_a_policy_that_fails_costs_its_attempt(
    folder: Path, loaded: LoadedPlugins, fails: str, text: str
) -> None:
    bad = job_file("bad", goal=1, more=RETRY, sampling={"policy": "labelled", "fails": fails})
    async with daemons.running(folder, plugins=loaded) as site:
        client = await site.enroll()
        poll = asyncio.ensure_future(client.check_in())
        await site.waiting(1)
        job = await site.operator.start(bad)
        await site.operator.until(job, "job", "FAILED")
        assert text in (await site.operator.show(job)).reason
        poll.cancel()
        await completes(site, client, loaded)


@pytest.mark.fault("F51")
@pytest.mark.parametrize(
    ("fails", "text"),
    [
        ("raises", "the codec \"halves\": read() raised KeyError: 'exponent'"),
        ("short", 'the codec "halves": read() yielded float32[7]; expected a block of float32[8]'),
    ],
)
async def test_a_codec_that_fails_costs_one_update(folder: Path, loaded: LoadedPlugins, fails: str, text: str) -> None:
    more = f'[compression]\nuplink = {{ codec = "halves", fails = "{fails}" }}\n'
    large = Parameters.from_arrays({name: array + 1000 for name, array in initial_model().items()})
    async with daemons.running(folder, plugins=loaded) as site:
        job = await site.operator.start(job_file(more=more, min_fraction=0.5))
        one, two = await site.fleet(2)
        refused, accepted = await asyncio.gather(
            deliver(one, large, loaded), deliver(two, update_of(initial_model(), 1), loaded)
        )
        assert text in refused
        assert accepted == ""
        await site.operator.until(job, "job", "COMPLETED")
        assert {each.split()[0] for each in (await site.operator.reasons(job)).values()} == {"REJECTED", "MERGED"}


async def completes(site: Site, client: RawClient, loaded: LoadedPlugins) -> None:
    """Another job of the same server is completed."""
    job = await site.operator.start(job_file("after", goal=1))
    assert await deliver(client, update_of(initial_model(), 1), loaded) == ""
    await site.operator.until(job, "job", "COMPLETED")


LATE_RULE = '[aggregation]\nrule = "late"\n'
LATE_CODEC = '[compression]\nuplink = { codec = "late" }\n'
LATE_WEIGHT = '[mode]\nkind = "buffered"\nconcurrency = 1\nmax_staleness = 2\nstaleness = "late"\n'
LATE = [LATE_RULE, LATE_CODEC, "private", "policy", LATE_WEIGHT]


@pytest.mark.fault("F51")
async def test_a_rule_that_can_no_longer_be_built_costs_its_attempt(folder: Path) -> None:
    late = plugins.load_late(folder)
    async with daemons.running(folder, plugins=late) as site:
        job, client = await site.operator.start(job_file(goal=1, more=LATE_RULE + RETRY)), await site.enroll()
        for _ in range(2):
            one = await client.assignment()
            plugins.allow_calls(folder, 0)
            answer = await client.report_inline(one.token, update_of(initial_model(), 1).to_bytes())
            assert reason_name(answer.refusal.reason) == "ATTEMPT_ABANDONED"
            plugins.allow_calls(folder, None)
        await site.operator.until(job, "job", "FAILED")
        reason = (await site.operator.show(job)).reason
        assert "aggregation.rule = \"late\": build() raised KeyError: 'the table of a colleague'" in reason
        await completes(site, client, late)


@pytest.mark.fault("F51")
@pytest.mark.parametrize("uploads", [False, True])
async def test_a_codec_that_can_no_longer_be_built_costs_one_update(folder: Path, *, uploads: bool) -> None:
    late = plugins.load_late(folder)
    async with daemons.running(folder, plugins=late) as site:
        job = await site.operator.start(job_file(rounds=2, goal=1, more=LATE_CODEC + RETRY))
        client, update = await site.enroll(), update_of(initial_model(), 1)
        assert await deliver(client, update, late) == ""
        one = await client.assignment(codecs=CODECS)
        content = encode(one, update, late)
        plugins.allow_calls(folder, 0)
        with pytest.raises(aio.AioRpcError, match=r'codec = "late": build\(\) raised KeyError') as caught:
            await (client.upload if uploads else client.report_inline)(one.token, content)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        plugins.allow_calls(folder, None)
        assert await deliver(client, update, late) == ""
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.fault("F51")
@pytest.mark.parametrize("more", ["policy", LATE_WEIGHT])
async def test_a_policy_and_a_staleness_weight_are_asked_before_the_job_begins(folder: Path, more: str) -> None:
    late = plugins.load_late(folder)
    async with daemons.running(folder, plugins=late) as site:
        job, client = await site.operator.start(late_job(more)), await site.enroll()
        plugins.allow_calls(folder, 0)
        assert await deliver(client, update_of(initial_model(), 1), late) == ""
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.parametrize("more", LATE)
async def test_plugins_that_fail_at_any_call_of_a_submission(folder: Path, more: str) -> None:
    late = plugins.load_late(folder)
    text = late_job(more)
    async with daemons.running(folder, plugins=late) as site:
        refused: list[aio.AioRpcError] = []
        for count in range(20):
            plugins.allow_calls(folder, count)
            try:
                await site.operator.create(text)
            except aio.AioRpcError as exc:
                refused.append(exc)
        assert 0 < len(refused) < 20
        assert {exc.code() for exc in refused} == {grpc.StatusCode.INVALID_ARGUMENT}
        assert all("KeyError: 'the table of a colleague'" in (exc.details() or "") for exc in refused)


@pytest.mark.fault("F51")
@pytest.mark.parametrize("more", LATE)
async def test_plugins_that_fail_when_the_server_starts_again(folder: Path, more: str) -> None:
    late = plugins.load_late(folder)
    async with daemons.running(folder, plugins=late) as site:
        job = await site.operator.start(late_job(more))
    for count in (3, 2, 1, 0):
        plugins.allow_calls(folder, count)
        async with daemons.running(folder, plugins=late) as site:
            shown = await site.operator.show(job)
            if shown.status == PAUSED:
                assert "KeyError: 'the table of a colleague'" in shown.reason
            else:
                assert shown.status == RUNNING
                assert count
    plugins.allow_calls(folder, None)
    async with daemons.running(folder, plugins=late) as site:
        assert (await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job))).status == RUNNING


def late_job(more: str) -> str:
    """The file of a job with a plugin that works for a while."""
    if more == "policy":
        return job_file(goal=1, sampling={"policy": "late"})
    return (
        job_file(goal=1, close="deadline", more=LATE_RULE + PRIVATE)
        if more == "private"
        else job_file(goal=1, more=more)
    )


PRIVATE = """
[updates]
clip_norm = 1.0
weighting = "uniform"
[privacy]
participation = "fixed"
delta = 1e-5
noise_multiplier = 1.0
"""


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ('[aggregation]\nrule = "{path}:Scaled"\n', "expected one of fedavg, "),
        ('[aggregation]\nrule = "{path}:Scaled"\n', "--plugin rules.NAME adds it"),
        ('[aggregation]\nrule = "scalad"\n', "did you mean scaled"),
        ('[config]\nalgorithm = "{path}:Mine"\n', "a job cannot name code of a client"),
        (CODEC + PRIVATE, 'compression.uplink.codec = "halves": expected none, bf16'),
        (RULE + "fails = 3\n", "aggregation.fails = 3: expected text"),
    ],
)
async def test_jobs_that_are_refused(folder: Path, loaded: LoadedPlugins, more: str, text: str) -> None:
    other = plugins.write_file(folder, name="elsewhere.py")
    async with daemons.running(folder, plugins=loaded) as site:
        with pytest.raises(aio.AioRpcError) as caught:
            await site.operator.create(job_file(close="deadline", more=more.replace("{path}", str(other))))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in (caught.value.details() or "")
    assert not any(name.startswith("elsewhere") for name in sys.modules)


async def test_a_codec_that_cannot_bound_its_payloads_is_refused(folder: Path) -> None:
    path = folder / "boundless.py"
    path.write_text(plugins.SOURCE.replace("lambda size: 2 * size", "lambda size: 1 / 0"))
    async with daemons.running(folder, plugins=plugins.load(path)) as site:
        with pytest.raises(aio.AioRpcError, match=r'"halves": max_bytes\(\) raised ZeroDivisionError'):
            await site.operator.create(job_file(more=CODEC))


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        ("rules.scaled", "no installed package has an entry point 'scaled' in the group fedplat.rules"),
        ("rules.scaled=", "the reference is missing; expected KIND.NAME="),
        ("scaled=own.py:Scaled", "expected KIND.NAME=/path/to/file.py:NAME"),
        ("rule.scaled=own.py:Scaled", "the kind is 'rule'; expected one of rules, "),
        ("partitions.mine=own.py:Scaled", "the kind is 'partitions'; expected one of rules, "),
        ("rules.fedavg=own.py:Scaled", "fedavg is a built-in name, which a plugin cannot replace"),
        ("rules.a b=own.py:Scaled", "a NAME has at most 63 letters"),
        ("rules.scaled=gone.py:Scaled", "there is no file"),
        ("rules.scaled=own.py:Gone", "has no 'Gone'"),
        ("rules.scaled=own.py:Labelled", "rules.scaled: Labelled has no build(); an aggregation rule has build()"),
        ("rules.scaled=own.py:np", "is of type module; expected a class"),
        ("rules.scaled=broken.py:Scaled", "import broken.py raised ModuleNotFoundError: No module named 'no_such"),
    ],
)
def test_a_wrong_plugin_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plugin: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    plugins.write_file(tmp_path)
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    before = list(sys.path)
    status, out, err = commands.here(monkeypatch, capsys, "run", "--insecure", "--plugin", plugin)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"fedplat-server: --plugin {plugin.partition('=')[0]}")
    assert text in err
    assert sys.path == before


def test_a_name_is_given_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = plugins.options(plugins.write_file(tmp_path), "rules.scaled") * 2
    status, _, err = commands.here(monkeypatch, capsys, "run", "--insecure", *twice)
    assert status == 2
    assert "rules.scaled is " in err
