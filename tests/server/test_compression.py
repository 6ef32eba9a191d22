"""Encoded updates against the real server: merged as they are decoded, whatever is wrong with them refused in words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from fedplat import codecs
from fedplat.aggregate import Accumulator, Contribution
from fedplat.codecs.container import Format, options_to_text
from fedplat.job import build_rule, parse_job
from fedplat.model import Parameters
from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import RawClient, Site, digest_of, reason_name, update_of
from support.jobs import job_file

NAMES = tuple(codecs.CODECS)
BF16 = codecs.Bf16()
TABLE = '[compression]\nuplink = {codec = "bf16"}\n'


def base_model(size: int = 3000) -> Parameters:
    rng = np.random.default_rng(0)
    arrays = {"weight": rng.normal(size=size).astype("f4"), "bias": np.ones(7, "f4"), "steps": np.arange(3)}
    return Parameters.from_arrays(arrays, "max")


def encoded(update: Parameters, options: codecs.CodecOptions = BF16, seed: int = 5) -> bytes:
    return b"".join(Format(options, update.schema).encode(update, np.random.default_rng(seed)))


def merged(text: str, base: Parameters, contents: list[bytes]) -> Parameters:
    """The next version, computed from the files that clients sent."""
    spec = parse_job(text)
    assert spec.compression.uplink is not None
    rule = build_rule(spec)
    accumulator = Accumulator(base.schema, rule)
    for content in contents:
        accumulator.fold(Format(spec.compression.uplink, base.schema).decode(content), Contribution(1.0))
    return accumulator.finish(base, rule.init(base.schema.num_floating))[0]


async def at_work(site: Site, text: str, base: Parameters, count: int = 2) -> tuple[str, list[RawClient], list[str]]:
    """A job with clients that know all codecs and work for it."""
    job = await site.operator.start(text, base)
    clients = await site.fleet(count)
    assignments = await asyncio.gather(*(client.assignment(codecs=NAMES) for client in clients))
    uplink = parse_job(text).compression.uplink
    assert uplink is not None
    assert {assignment.uplink for assignment in assignments} == {options_to_text(uplink)}
    return job, clients, [assignment.token for assignment in assignments]


@pytest.mark.parametrize("name", codecs.CODECS)
async def test_encoded_updates_are_merged_as_they_are_decoded(site: Site, name: str) -> None:
    text, base = job_file(more=f'[compression]\nuplink = {{codec = "{name}"}}\n'), base_model()
    contents = [encoded(update_of(base, seed), codecs.CODECS[name](), seed) for seed in (1, 2)]
    job, (one, two), tokens = await at_work(site, text, base)
    assert (await one.deliver(tokens[0], contents[0])).HasField("receipt")
    assert (await two.report_inline(tokens[1], contents[1])).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")
    assert await site.operator.export(job) == merged(text, base, contents).to_bytes()
    (attempt,) = await site.operator.rounds(job)
    assert attempt.update_bytes == sum(map(len, contents))


def bad_updates(base: Parameters) -> dict[str, tuple[bytes, str]]:
    update = update_of(base, 1)
    content, other = encoded(update), update_of(base_model(3001), 1)
    carried = 3 * 8
    nan = content[: -carried - 2] + b"\xff\x7f" + content[-carried:]
    keep = Parameters(type(base.schema)(base.schema.tensors, "keep"), update.buffer)
    return {
        "not encoded": (update.to_bytes(), "is not encoded as this version of fedplat does it"),
        "another codec": (content.replace(b'"bf16"', b'"eden"'), 'is encoded with \'{"codec":"eden",'),
        "other tensors": (encoded(other), "belongs to other tensors"),
        "another carry rule": (encoded(keep), "belongs to other tensors"),
        "cut": (content[:-1], "the payload ends after"),
        "a byte too many": (content + b"\0", "expected at most"),
        "a second update": (content + content, "expected at most"),
        "no payload": (content[: len(content) - 6014 - carried] + content[-carried:], "the payload ends after 0"),
        "the beginning alone": (content[:100], "ends within its first lines"),
        "empty": (b"", "is not encoded"),
        "NaN": (nan, "NaN"),
        "rubbish": (b"\xff" * 500, "is not encoded"),
    }


@pytest.mark.slow
@pytest.mark.fault("F22", "F23", "F24", "F25")
async def test_encoded_updates_that_do_not_fit(site: Site, subtests: pytest.Subtests) -> None:
    base = base_model()
    text, good_one = job_file(min_fraction=0.5, more=TABLE), encoded(update_of(base, 2))
    for name, (content, words) in bad_updates(base).items():
        with subtests.test(name):
            job, (good, bad), tokens = await at_work(site, text, base)
            refusal = (await bad.deliver(tokens[1], content)).refusal
            assert reason_name(refusal.reason) in ("REJECTED_SCHEMA", "REJECTED_NONFINITE")
            assert words in refusal.text
            assert str(site.folder) not in refusal.text
            assert (await good.deliver(tokens[0], good_one)).HasField("receipt")
            await site.operator.until(job, "job", "COMPLETED")
            assert await site.operator.export(job) == merged(text, base, [good_one]).to_bytes()


@pytest.mark.fault("F25")
async def test_more_than_the_codec_can_have_written_is_not_even_received(site: Site) -> None:
    base = base_model(2_000_000)  # in a job without compression so much more would still be taken
    limit = Format(BF16, base.schema).max_bytes + 2**20
    job, (one, two), tokens = await at_work(site, job_file(more=TABLE, min_fraction=0.5), base)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await one.upload(tokens[0], b"", size_bytes=limit + 1)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await one.stop_reason(tokens[0]) == "REJECTED_SCHEMA"
    assert (await two.deliver(tokens[1], encoded(update_of(base, 1)))).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")


async def test_a_client_that_does_not_know_the_codec_gets_no_work(site: Site) -> None:
    old, new = await site.fleet(2)
    waiting = old.check_in(codecs=("other",))
    await site.waiting(1)
    await site.operator.start(job_file(goal=1, more=TABLE))
    assert (await new.assignment(codecs=NAMES)).uplink == options_to_text(BF16)
    waiting.cancel()
    refusal = await old.refusal(codecs=("other",))
    assert (reason_name(refusal.reason), "codecs" in refusal.text) == ("NOT_ELIGIBLE", True)


async def test_accepted_updates_outlive_a_restart(folder: Path) -> None:
    text, base = job_file(more=TABLE), base_model()
    contents = [encoded(update_of(base, seed), seed=seed) for seed in (1, 2)]
    async with daemons.running(folder) as site:
        job, (one, two), tokens = await at_work(site, text, base)
        assert (await one.deliver(tokens[0], contents[0])).HasField("receipt")
    report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
    assert (report.findings, report.checked["updates"]) == ([], 1)
    async with daemons.running(folder) as site:
        again = RawClient(site.channel, two.key)
        again.client_id = two.client_id
        await again.open_session()
        assert (await again.deliver(tokens[1], contents[1])).receipt.digest == digest_of(contents[1])
        await site.operator.until(job, "job", "COMPLETED")
        assert await site.operator.export(job) == merged(text, base, contents).to_bytes()
