"""What a client does not accept of a secure aggregation: its owner's limits, and a server that lies."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from fedplat.model import Parameters
from fedplat.secure_aggregation.messages import HeldShares, Message, Roster, Survivors, UnmaskRequest
from fedplat.secure_aggregation.setup import LocalNoise, Setup
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import Client, ClientOptions, EvaluateResult, Task, TrainResult
from fedplat_client.commands import main
from support.fake_fleet import FakeFleet, serving
from support.secure_cohort import MakeCohort

UNSAFE = model_pb2.REASON_UNSAFE_AGGREGATION
KEYS = [f"{number:064x}" for number in range(5)]
replace = msgspec.structs.replace


def encode_setup(setup: Setup, change: dict[str, Any] | bytes) -> bytes:
    """The bytes of a setup with other fields, some of them of its encoding; or other bytes."""
    if isinstance(change, bytes):
        return change
    names = {each.name for each in msgspec.structs.fields(setup.encoding)}
    encoding = replace(setup.encoding, **{name: value for name, value in change.items() if name in names})
    others = {name: value for name, value in change.items() if name not in names}
    return replace(setup, encoding=encoding, **others).to_bytes()


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        ({"job_id": "job-2"}, {}, "is for the job 'job-2'; the assignment is for 'job-1'"),
        ({"round": 2}, {}, "is for the round 2; the assignment is for 1"),
        ({"attempt": 2}, {}, "is for the attempt 2; the assignment is for 1"),
        ({"model_digest": "0" * 64}, {}, f"is for the model digest '{'0' * 64}'"),
        ({"task_digest": "0" * 64}, {}, f"is for the task digest '{'0' * 64}'"),
        ({"version": 1}, {}, "the secure aggregation has version 1; this program has 2"),
        (
            {"size": 7},
            {},
            "is for 7 entries; the update has 2050 floating-point entries",
        ),
        ({"clip": float("inf")}, {}, "the setup of the secure aggregation cannot be read"),
        ({"max_examples": float("nan")}, {}, "the setup of the secure aggregation cannot be read"),
        ({"bits": 10**9}, {}, "the setup of the secure aggregation cannot be read"),
        ({"modulus": 8}, {}, "does not have the job's options"),
        ({"metrics": (("loss", 1.0, 2.0),)}, {}, "does not have the job's options"),
        ({"max_clients": 0}, {}, "the setup of the secure aggregation cannot be read"),
        (b"rubbish", {}, "the setup of the secure aggregation cannot be read"),
        (bytes(70_000), {}, "has 70000 bytes; expected at most 65536"),
        (
            {"minimum": 2},
            {},
            "unmasks sums of 2 clients; the owner of this client requires at",
        ),
        (
            {},
            {"min_secure_clients": 4},
            "unmasks sums of 3 clients; the owner of this client requires",
        ),
        (
            {},
            {"min_secure_threshold": 0.7},
            "the job's threshold is 0.666667; this client requires 0.7",
        ),
        ({}, {"require_local_noise": True}, 'the job needs [privacy] trust = "none"'),
        ({}, {"min_local_noise_multiplier": 0.1}, 'the job needs [privacy] trust = "none"'),
        ({}, {"require_confirmation": True}, "the job needs [secure_aggregation] confirm = true"),
        ({"noise": LocalNoise(1.0, float("nan"), 1, 1.0)}, {}, "the setup of the secure aggregation cannot be read"),
        (b"", {"require_local_noise": True}, "only with secure aggregation; the job has none"),
        (b"", {"min_local_noise_multiplier": 0.1}, "only with secure aggregation; the job has none"),
        (b"", {"require_secure_aggregation": True}, "only with secure aggregation; the job has none"),
    ],
)
def test_what_the_owner_or_the_protocol_does_not_allow_is_not_trained(
    make_cohort: MakeCohort, change: dict[str, Any] | bytes, options: dict[str, Any], text: str
) -> None:
    cohort = make_cohort(1)
    cohort.fleet.work.clear()
    cohort.assign(secure_setup=encode_setup(cohort.fleet.setup, change))
    with serving(cohort.fleet):
        cohort.client(1, refuse_to_train, **options).run(max_tasks=1)
    (failure,) = cohort.failures
    assert failure.reason == UNSAFE
    assert text in failure.text
    assert "Step" not in cohort.fleet.calls


def refuse_to_train(task: Task) -> TrainResult:
    raise AssertionError("the client trained")


@pytest.mark.fault("S4")
@pytest.mark.parametrize(
    "told",
    [
        {"config": {"steps": model_pb2.Value(int_value=0)}},
        {"trainer": "idle"},
        {"job_name": "other"},
    ],
)
def test_a_client_does_not_train_if_it_is_told_something_else_than_the_others(
    make_cohort: MakeCohort, told: dict[str, Any]
) -> None:
    """A server that lets all others make no step would learn the update of one from the sum."""
    cohort = make_cohort(1)
    cohort.fleet.work.clear()
    cohort.assign(**told)
    with serving(cohort.fleet):
        client = cohort.client(1, refuse_to_train)
        client.add_trainer("idle", refuse_to_train)
        client.run(max_tasks=1)
    (failure,) = cohort.failures
    assert failure.reason == UNSAFE
    assert "is for the task digest" in failure.text
    assert "Step" not in cohort.fleet.calls


@pytest.mark.parametrize(("floor", "is_enough"), [(0.0017, True), (0.0018, False)])
def test_the_owner_sets_the_least_noise_of_a_sum(
    make_cohort: MakeCohort, tmp_path: Path, floor: float, is_enough: bool
) -> None:
    """The update of 2050 entries is clipped to 1000 steps, and each client's noise has a deviation of 1."""
    cohort = make_cohort(4, noise=LocalNoise(1000.0, 1.0), metrics={})
    sensitivity = cohort.fleet.setup.encoding.sensitivity
    assert 1000.0 < sensitivity < 1000.0 + 2050**0.5
    assert (3**0.5 / sensitivity >= floor) == is_enough
    cohort.run(options_of=lambda number: {"min_local_noise_multiplier": floor})
    if is_enough:
        assert len(cohort.check_sum(tmp_path)) == 4
        return
    assert [each.reason for each in cohort.failures] == [UNSAFE] * 4
    assert "the noise multiplier of a sum of 3 clients is 0.001" in cohort.failures[0].text


@pytest.mark.fault("S10")
def test_a_client_takes_part_in_an_attempt_once(make_cohort: MakeCohort, tmp_path: Path) -> None:
    """The server gives out the attempt again after a restart of the client, which has nothing of it but its record."""
    cohort = make_cohort(3)
    with serving(cohort.fleet):
        with cohort.running():
            pass
        cohort.assign()
        cohort.assign(attempt=2, secure_setup=replace(cohort.fleet.setup, attempt=2, version=9).to_bytes())
        cohort.client(1, refuse_to_train).run(max_tasks=2)
    again, other = cohort.failures
    assert again.reason == model_pb2.REASON_KEYS_LOST
    assert again.text == (
        "the client has sent its keys for attempt 1 of round 1 before, and takes part in an attempt once"
    )
    assert "has version 9" in other.text  # the next attempt is another one
    assert len(cohort.fleet.messages["token-1", "keys"]) == 1
    assert len(cohort.check_sum(tmp_path)) == 3


def test_a_client_that_cannot_record_the_attempt_does_not_take_part(make_cohort: MakeCohort) -> None:
    cohort = make_cohort(1)
    with serving(cohort.fleet):
        client = cohort.client(1, refuse_to_train)
        client.load_public_key()
        (found,) = (cohort.folder / "data-1").glob("*/*/identity.json")
        (found.parent / "served").mkdir()
        client.run(max_tasks=1)
    (failure,) = cohort.failures
    assert failure.reason == UNSAFE
    assert "the client cannot record the attempts that it takes part in" in failure.text


def test_evaluations_need_no_secure_aggregation(
    fleet: FakeFleet, make_client: Callable[..., Client], model: model_pb2.ModelRef
) -> None:
    fleet.assign(model, task=fleet_pb2.TASK_EVALUATE)
    client = make_client(require_secure_aggregation=True)
    client.add_evaluator("digits", lambda task: EvaluateResult(num_examples=1, metrics={"loss": 0.5}))
    client.run(max_tasks=1)
    assert "Fail" not in fleet.calls


def test_an_update_that_cannot_be_encoded_ends_the_assignment_before_the_keys_are_sent(
    make_cohort: MakeCohort,
) -> None:
    cohort = make_cohort(1)

    def diverge(task: Task) -> TrainResult:
        task.parameters["bias"][3] = float("nan")
        return TrainResult(parameters=task.parameters, num_examples=1)

    with serving(cohort.fleet):
        cohort.client(1, diverge).run(max_tasks=1)
    assert [each.reason for each in cohort.failures] == [model_pb2.REASON_TRAINER_ERROR]
    assert "NaN" in cohort.failures[0].text
    assert "Step" not in cohort.fleet.calls


def shorten_roster(roster: Roster) -> Roster:
    return replace(roster, members=roster.members[:2])


def move_receiver(roster: Roster) -> Roster:
    return replace(roster, position=1)


def replace_member(roster: Roster) -> Roster:
    return replace(roster, members=(*roster.members[:3], replace(roster.members[3], public_key=bytes(32))))


def repeat_member(roster: Roster) -> Roster:
    return replace(roster, members=(*roster.members[:3], roster.members[2]))


def send_no_shares(held: HeldShares) -> HeldShares:
    return HeldShares({})


def survive(*survivors: int, dropped: tuple[int, ...] = ()) -> Callable[[UnmaskRequest], UnmaskRequest]:
    def change(request: UnmaskRequest) -> UnmaskRequest:
        return replace(request, survivors=Survivors(survivors, dropped))

    return change


TYPES: dict[str, type[Message]] = {"roster": Roster, "shares": HeldShares, "unmask": UnmaskRequest}


@pytest.mark.fault("S4", "S6", "S7")
@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("roster", None, "are not a Roster"),
        ("roster", shorten_roster, "the group has 2 clients; expected 3 to 10"),
        ("roster", move_receiver, "at this client's position"),
        ("roster", repeat_member, "a client is on the roster more than once"),
        ("roster", replace_member, "the signature of the keys at position 3 is not valid"),
        ("shares", None, "are not a HeldShares"),
        ("shares", send_no_shares, "1 clients that hold shares of this one have sent shares; expected 3"),
        ("unmask", None, "are not a UnmaskRequest"),
        ("unmask", survive(0, 1), "there are 2 survivors; expected at least 3"),
        ("unmask", survive(0, 1, 2, 3, dropped=(3,)), "a position is named twice as a survivor or dropped, or as both"),
        ("unmask", survive(1, 2, 3, dropped=(0,)), "is not among the survivors"),
    ],
)
def test_a_message_that_is_not_safe_is_refused_with_a_reason(
    make_cohort: MakeCohort, tmp_path: Path, kind: str, change: Callable[[Any], Message] | None, text: str
) -> None:
    """The client is at position 0; the others do not depend on it."""
    cohort = make_cohort(4)

    def lie(token: str, content: bytes) -> bytes:
        if token != "token-1":
            return content
        return b"rubbish" if change is None else change(TYPES[kind].from_bytes(content)).to_bytes()

    cohort.fleet.lies[kind] = lie
    cohort.run()
    (failure,) = cohort.failures
    assert (failure.token, failure.reason) == ("token-1", UNSAFE)
    assert text in failure.text
    assert ("token-1", "answer") not in cohort.fleet.messages
    assert ("token-1" in cohort.check_sum(tmp_path)) == (kind == "unmask")


@pytest.mark.fault("S4", "S10")
def test_survivors_that_differ_from_those_confirmed_are_not_answered(make_cohort: MakeCohort) -> None:
    cohort = make_cohort(5, confirm=True)
    change = survive(0, 1, 2, 3)
    cohort.fleet.lies["unmask"] = lambda token, content: change(UnmaskRequest.from_bytes(content)).to_bytes()
    cohort.run()
    assert [each.reason for each in cohort.failures] == [UNSAFE] * 5
    assert "the server named other survivors before" in cohort.failures[0].text
    assert not any(kind == "answer" for _, kind in cohort.fleet.messages)


def test_an_answer_of_another_step_is_refused(make_cohort: MakeCohort) -> None:
    cohort = make_cohort(4)
    cohort.fleet.answer_kinds["token-1", "keys"] = "unmask"
    cohort.run()
    (failure,) = cohort.failures
    assert failure.text == "the server answered a step of the secure aggregation with unmask; expected roster"


def test_only_trusted_clients_may_be_in_the_sum(make_cohort: MakeCohort, tmp_path: Path) -> None:
    cohort = make_cohort(5)
    with serving(cohort.fleet):
        keys = {number: cohort.client(number).load_public_key() for number in range(1, 6)}
        trusted = {
            1: [keys[2], keys[3]],
            2: tmp_path / "silos",
            3: set(keys.values()),
            4: None,
            5: [keys[1], keys[2], keys[3].upper(), keys[4]],  # its own may be left out
        }
        (tmp_path / "silos").write_text("# the silos\n\n" + "".join(f"{key}  # {n}\n" for n, key in keys.items()))
        with cohort.running(options_of=lambda number: {"trusted_clients": trusted[number]}):
            pass
    (failure,) = cohort.failures
    assert (failure.token, failure.reason) == ("token-1", UNSAFE)
    assert failure.text == "the client at position 3 is not one that this client trusts"
    assert cohort.check_sum(tmp_path) == [f"token-{number}" for number in (2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_secure_clients": 2}, "min_secure_clients is 2; expected at least 3 and at most 1000"),
        ({"min_secure_clients": 1001}, "min_secure_clients is 1001; expected at least 3"),
        ({"min_secure_threshold": 0.4}, "min_secure_threshold is 0.4; expected at least 0.5 and at most 1"),
        ({"min_secure_threshold": float("nan")}, "min_secure_threshold is nan"),
        ({"min_local_noise_multiplier": -1.0}, "min_local_noise_multiplier is -1.0; expected a number of at least 0"),
        ({"min_local_noise_multiplier": float("inf")}, "min_local_noise_multiplier is inf"),
        ({"trusted_clients": KEYS[0]}, "trusted_clients is text; expected a set of public keys, or a Path"),
        ({"trusted_clients": ["abc"]}, "trusted_clients has 'abc'; expected a public key of 64 hexadecimal digits"),
        ({"trusted_clients": [KEYS[0][2:]]}, "expected a public key of 64 hexadecimal digits"),
        ({"trusted_clients": []}, "trusted_clients has 0 public keys; expected at least 2 besides the client's own"),
        ({"trusted_clients": KEYS, "min_secure_clients": 7}, "has 5 public keys; expected at least 6"),
        ({"trusted_clients": Path("/missing")}, "trusted_clients: /missing cannot be read"),
    ],
)
def test_wrong_limits_are_refused_where_they_are_set(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        ClientOptions(**options)


def test_limits_survive_a_copy_of_the_options() -> None:
    options = ClientOptions(trusted_clients=KEYS, min_secure_clients=4, require_confirmation=True)
    copy = dataclasses.replace(options, min_secure_threshold=0.75)
    limits = copy.secure_limits(b"own" + bytes(29))
    assert (limits.min_survivors, limits.min_threshold, limits.require_confirmation) == (4, 0.75, True)
    assert limits.trusted_keys == {b"own" + bytes(29), *map(bytes.fromhex, KEYS)}
    assert ClientOptions().secure_limits(b"").trusted_keys is None


def test_the_command_has_the_limits_as_options(
    make_cohort: MakeCohort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cohort = make_cohort(1)
    cohort.assign(secure_setup=b"")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edge_limits.py").write_text("def digits(task):\n    raise AssertionError('the client trained')\n")
    (tmp_path / "silos").write_text("\n".join(KEYS))
    (tmp_path / "few").write_text(KEYS[0])
    arguments = ["run", "--data-dir", "data", "--label", "number=1", "--trainer", "edge_limits.py:digits"]
    limits = ["--min-secure-clients", "4", "--min-secure-threshold", "0.6", "--require-secure-aggregation"]
    with serving(cohort.fleet):
        monkeypatch.setenv("FEDPLAT_TICKET", cohort.fleet.ticket.to_text())
        done = CliRunner().invoke(main, [*arguments, *limits, "--trusted-clients", "silos", "--max-tasks", "2"])
        wrong = CliRunner().invoke(main, [*arguments, "--trusted-clients", "few"])
        for _ in range(2):
            cohort.assign()
        noise = ["--min-local-noise-multiplier", "1"]
        for more in (["--require-confirmation"], noise):
            assert CliRunner().invoke(main, [*arguments, *more, "--max-tasks", "1"]).exit_code == 0
    assert done.exit_code == 0, done.output
    texts = [each.text for each in cohort.failures]
    assert "requires at least 4" in texts[0]
    assert "the job has none" in texts[1]
    assert "confirm = true" in texts[2]
    assert 'trust = "none"' in texts[3]
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)
    assert "trusted_clients has 1 public keys" in wrong.stderr


def test_the_command_shows_the_key_that_other_silos_trust(fleet: FakeFleet, tmp_path: Path, base: Parameters) -> None:
    """Before the first start, while the client runs, and after that."""
    given = ["identity", "--data-dir", str(tmp_path / "data")]
    without = CliRunner().invoke(main, given)
    assert (without.exit_code, without.stderr.count("\n")) == (2, 1)
    assert "has no identity" in without.stderr
    created = CliRunner().invoke(main, given, env={"FEDPLAT_TICKET": fleet.ticket.to_text()})
    assert created.exit_code == 0, created.output
    key = created.stdout.strip()
    fleet.assign(fleet.add_model(base))
    client = Client.from_ticket(fleet.ticket.to_text(), data_dir=tmp_path / "data")
    shown: list[str] = []

    def train(task: Task) -> TrainResult:
        shown.append(CliRunner().invoke(main, given).stdout.strip())
        return TrainResult(parameters=task.parameters, num_examples=1)

    client.add_trainer("digits", train)
    client.run(max_tasks=1)
    assert shown == [key]
    assert fleet.requests["Enroll"][0].public_key.hex() == key
