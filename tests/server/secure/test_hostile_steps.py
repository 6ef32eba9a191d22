"""Steps of clients that are hostile, late or confused: they cost the others nothing, and change no sum."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest

from fedplat.secure_aggregation import messages, setup
from fedplat.secure_aggregation.messages import KeyAdvertisement, Roster, SealedShares, UnmaskAnswer
from fedplat.secure_aggregation.setup import FEATURE
from fedplat.wire.v1 import admin_pb2, model_pb2
from fedplat_server.errors import StoreUnavailableError
from fedplat_server.records import audit
from support import daemons
from support.daemons import Site, initial_model
from support.gateways import code_of
from support.secure_clients import (
    STEP_S,
    EndedError,
    SecureWork,
    begin_all,
    expected_model,
    new_participant,
    secure_job,
    together,
)

__all__ = ["daemons"]  # the tests run again on a store that fails
SIZE = initial_model().schema.num_floating


async def begin_job(site: Site, num_clients: int = 5, **options: Any) -> tuple[str, list[SecureWork]]:
    job = await site.operator.start(secure_job(goal=num_clients, **options))
    return job, await begin_all(site, await site.fleet(num_clients), SIZE)


async def model_is_of(site: Site, job: str, survivors: list[SecureWork]) -> None:
    await site.operator.until(job, "job", "COMPLETED")
    model = await site.operator.model(job)
    assert model.to_vector().tobytes() == expected_model(initial_model(), survivors).tobytes()


@pytest.mark.fault("S3")
async def test_the_same_message_again_gets_the_same_answer(site: Site) -> None:
    job, works = await begin_job(site)

    async def twice(work: SecureWork) -> None:
        keys = work.participant.advertise()
        work.roster = (await work.step(keys=keys)).secure.roster
        shares = work.participant.share(work.roster)
        work.held = (await work.step(shares=shares)).secure.shares
        assert (await work.step(keys=keys)).secure.roster == work.roster
        assert (await work.step(shares=shares)).secure.shares == work.held
        work.mask()
        await work.report()
        request = await work.step()
        again = await work.step()
        assert again.SerializeToString() == request.SerializeToString() or again.HasField("done")
        if request.secure.HasField("unmask"):
            answer = work.participant.answer(request.secure.unmask)
            assert (await work.step(answer=answer)).HasField("done")
            assert (await work.step(answer=answer)).HasField("done")

    await asyncio.gather(*map(twice, works))
    await model_is_of(site, job, works)


@pytest.mark.fault("S3")
async def test_messages_of_another_step_or_with_other_content_change_nothing(site: Site) -> None:
    job, works = await begin_job(site)
    first = works[0]
    # Before its keys, or while others have not sent theirs, there is no roster that shares could belong to.
    empty = SealedShares({}, bytes(32)).to_bytes()
    for message in ({"shares": empty}, {"confirmation": b"x"}, {"answer": b"x"}):
        _, text, code = await code_of(first.step(wait_s=0.0, **message))
        assert (code, "are expected when" in text or "is expected when" in text) == ("INVALID_REQUEST", True)
    await first.ask(lambda client: client.secure_step(first.token, 0.0, keys=first.participant.advertise()))
    other = new_participant(first.setup, first.client).advertise()
    with pytest.raises(EndedError, match="REJECTED_CONFLICT: other keys were accepted before"):
        await first.step(keys=other)
    await together(works, "take_part")
    await model_is_of(site, job, works)


@pytest.mark.fault("S3")
async def test_malformed_keys_cost_only_their_senders(site: Site) -> None:
    job, works = await begin_job(site, 6)
    for work, content in zip(works, (b"", b"\x93", os.urandom(200)), strict=False):
        with pytest.raises(EndedError, match="REJECTED_MESSAGE: the bytes are not a KeyAdvertisement"):
            await work.step(keys=content)
    await together(works[3:], "take_part")
    await model_is_of(site, job, works[3:])


async def test_messages_beyond_the_bounds_are_refused_unread(site: Site) -> None:
    job, works = await begin_job(site)
    first = works[0]
    for size in (messages.max_bytes(7) + 1, 2**20):
        _, text, code = await code_of(first.step(keys=bytes(size)))
        assert (code, "at most" in text) == ("TOO_LARGE", True)
    await together(works, "take_part")
    await model_is_of(site, job, works)


async def test_a_client_cannot_send_new_messages_forever(site: Site) -> None:
    """Each would be validated; they are bounded by their bytes for an attempt."""
    _, works = await begin_job(site)
    await works[0].ask(lambda client: client.secure_step(works[0].token, 0.0, keys=works[0].participant.advertise()))
    await together(works[1:], "advertise")
    big = bytes(messages.max_bytes(5))
    codes: list[str] = []
    for _ in range(12):
        _, _, code = await code_of(works[0].step(answer=big))
        codes.append(code)
    assert (codes[0], codes[-1]) == ("INVALID_REQUEST", "TOO_MANY_BYTES")


@pytest.mark.fault("S6")
async def test_a_key_of_another_client_is_refused(site: Site) -> None:
    job, works = await begin_job(site)
    first, second, *others = works
    keys = KeyAdvertisement.from_bytes(first.participant.advertise())
    payload = setup.keys_payload(second.setup, keys.encryption_key, keys.masking_key)
    copied = KeyAdvertisement(keys.encryption_key, keys.masking_key, second.client.key.sign(payload))
    await first.ask(lambda client: client.secure_step(first.token, 0.0, keys=keys.to_bytes()))
    with pytest.raises(
        EndedError, match="REJECTED_MESSAGE: another client of the attempt has sent the same public key"
    ):
        await second.step(keys=copied.to_bytes())
    await together([first, *others], "take_part")
    await model_is_of(site, job, [first, *others])


@pytest.mark.fault("S3")
async def test_keys_that_another_key_has_signed_are_refused(site: Site) -> None:
    _, works = await begin_job(site)
    keys = works[1].participant.advertise()
    with pytest.raises(EndedError, match="REJECTED_MESSAGE: the signature of the keys"):
        await works[0].step(keys=keys)


def swap_shares(answer: bytes) -> bytes:
    """An answer whose shares are of the wrong clients, each well-formed."""
    right = UnmaskAnswer.from_bytes(answer)
    positions = sorted(right.seed_shares)
    shares = {to: right.seed_shares[of] for to, of in zip(positions, [*positions[1:], positions[0]], strict=True)}
    return UnmaskAnswer(shares, right.key_shares).to_bytes()


@pytest.mark.fault("S5")
async def test_wrong_shares_are_corrected_and_their_source_is_named(site: Site) -> None:
    """The first group has all answers before the second one has enough, so that the wrong ones can be told."""
    job, works = await begin_job(site, 10, group=5, threshold=0.55)
    await together(works, "until_reported")
    requests = [(await work.step()).secure.unmask for work in works]
    names = [member.client_id for member in Roster.from_bytes(works[0].roster).members]
    wrong = names[0]  # the first position's shares are always used
    losses = iter([True])

    async def lose_the_answer() -> None:
        if next(losses, False):
            raise StoreUnavailableError("the answer was lost")

    site.store.after["append"] = lose_the_answer  # of the audit log: the attempt must survive it, and note it once
    for number in sorted(range(len(works)), key=lambda number: works[number].client.client_id not in names):
        answer = works[number].participant.answer(requests[number])
        is_wrong = works[number].client.client_id == wrong
        response = await works[number].step(answer=swap_shares(answer) if is_wrong else answer)
        assert response.HasField("done")
    await site.operator.until(job, "job", "COMPLETED")
    (row,) = [row for row in await site.store.inner.audit.list_rows() if row.action == audit.AuditAction.WRONG_SHARES]
    assert wrong in row.details
    assert daemons.STORM is not None or not list(losses), "a store that fails may have lost an answer of its own"
    expected = np.average([each.update for each in works], axis=0, weights=[each.num_examples for each in works])
    model = (await site.operator.model(job)).to_vector()
    np.testing.assert_allclose(model, initial_model().to_vector() + expected, atol=1e-4)


@pytest.mark.fault("S5")
async def test_without_enough_right_shares_the_attempt_is_abandoned(site: Site) -> None:
    job, works = await begin_job(site, step_s=STEP_S)
    await together(works, "until_reported")
    for work in works[:-1]:  # 4 of 5 shares recover a secret: each of the first four counts
        request = await work.step()
        await work.step(answer=swap_shares(work.participant.answer(request.secure.unmask)))
    event = await site.operator.until(job, "attempt", "ABANDONED")
    assert "cannot be removed" in event.reason
    again = await begin_all(site, [work.client for work in works], SIZE)
    assert {work.setup.attempt for work in again} == {2}
    await together(again, "take_part")
    await model_is_of(site, job, again)


@pytest.mark.fault("S7")
async def test_too_few_survivors_are_never_asked(site: Site) -> None:
    job, works = await begin_job(site)
    await together(works, "advertise", "share", "mask")
    await together(works[:2], "report")
    asking = asyncio.ensure_future(works[0].step())
    for work in works[2:]:
        await give_up(work)
    event = await site.operator.until(job, "attempt", "ABANDONED")
    assert "2 of at least" in event.reason
    with pytest.raises(EndedError, match="ATTEMPT_ABANDONED"):
        await asking
    again = await begin_all(site, [work.client for work in works], SIZE)
    first, second = (KeyAdvertisement.from_bytes(each.participant.advertise()) for each in (works[0], again[0]))
    assert first != second
    await together(again, "take_part")
    await model_is_of(site, job, again)


async def give_up(work: SecureWork) -> None:
    await work.ask(lambda client: client.fail(work.token, model_pb2.REASON_CLIENT_STOPPED))


@pytest.mark.fault("S8")
async def test_an_answer_after_the_last_one_that_is_needed_changes_nothing(site: Site) -> None:
    job, works = await begin_job(site, step_s=STEP_S)
    await together(works, "until_reported")
    requests = [(await work.step()).secure.unmask for work in works]
    for work, request in zip(works[:4], requests, strict=False):
        await work.step(answer=work.participant.answer(request))
    await site.operator.until(job, "job", "COMPLETED")
    assert (await works[4].step(answer=works[4].participant.answer(requests[4]))).HasField("done")
    await model_is_of(site, job, works)


@pytest.mark.slow
@pytest.mark.fault("S8")
@pytest.mark.calm("a store that fails takes its time, and the deadline of a step is short here")
async def test_late_shares_are_refused(site: Site) -> None:
    job, works = await begin_job(site, step_s=4.0)
    await together(works, "advertise")
    late, *others = works
    await together(others, "take_part")  # they have waited for the late one until its deadline
    with pytest.raises(EndedError, match="STEP_TIMEOUT"):
        await late.share()
    await model_is_of(site, job, others)


@pytest.mark.fault("S9")
async def test_a_restarted_client_has_lost_its_keys(site: Site) -> None:
    job, works = await begin_job(site)
    restarted, *others = works
    await restarted.ask(lambda client: client.secure_step(restarted.token, 0.0, keys=restarted.participant.advertise()))
    await restarted.client.refusal(features=(FEATURE,))
    with pytest.raises(EndedError, match="KEYS_LOST"):
        await restarted.step(keys=restarted.participant.advertise())
    await together(others, "take_part")
    await model_is_of(site, job, others)


@pytest.mark.fault("S9")
async def test_a_client_that_knows_of_lost_keys_leaves_the_attempt(site: Site) -> None:
    """It was stopped after it had recorded the attempt, and before the server had its keys."""
    job, works = await begin_job(site)
    restarted, *others = works
    assignment = await restarted.client.assignment(features=(FEATURE,))
    assert assignment.secure_setup == restarted.setup.to_bytes()
    await restarted.client.fail(assignment.token, model_pb2.REASON_KEYS_LOST, "its keys were in its memory")
    await together(others, "take_part")
    await model_is_of(site, job, others)


@pytest.mark.fault("S10")
async def test_two_attempts_at_once_have_nothing_in_common(site: Site) -> None:
    first_job, first = await begin_job(site)
    second_job, second = await begin_job(site)
    # What a client has made for one attempt does not fit the other.
    stranger = new_participant(first[0].setup, second[0].client)
    with pytest.raises(EndedError, match="REJECTED_MESSAGE: the signature of the keys"):
        await second[0].step(keys=stranger.advertise())
    await asyncio.gather(together(first, "until_reported"), together(second[1:], "advertise", "share", "mask"))
    own, second[1].masked = second[1].masked, first[1].masked
    with pytest.raises(EndedError, match="REJECTED_SCHEMA: the file is not a masked update for this attempt"):
        await second[1].report()
    second[1].masked = own
    with pytest.raises(EndedError, match="REJECTED_SCHEMA"):
        await second[1].report()
    await asyncio.gather(together(first, "finish"), together(second[2:], "report", "finish"))
    await model_is_of(site, first_job, first)
    await model_is_of(site, second_job, second[2:])


async def revoke(site: Site, work: SecureWork) -> None:
    await site.operator.clients.RevokeClient(admin_pb2.RevokeClientRequest(client_id=work.client.client_id))


async def test_an_update_of_a_client_that_was_revoked_before_the_survivors_were_fixed_is_not_in_the_sum(
    site: Site,
) -> None:
    job, works = await begin_job(site)
    await together(works, "advertise", "share", "mask")
    await together(works[:4], "report")
    await revoke(site, works[0])
    await together(works[4:], "report")
    await together(works[1:], "finish")
    await model_is_of(site, job, works[1:])


async def test_the_survivors_stay_the_same_if_one_of_them_is_revoked(site: Site) -> None:
    """As the report of a client that is revoked while a version is made: no second set may be asked for."""
    job, works = await begin_job(site, step_s=STEP_S)
    await together(works, "until_reported")
    first = await works[0].step()
    await revoke(site, works[4])
    assert (await works[0].step()).secure.unmask == first.secure.unmask
    await together(works[:4], "finish")
    await model_is_of(site, job, works)
