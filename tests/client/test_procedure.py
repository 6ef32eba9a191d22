"""A client answers a procedure only if it takes its reply for what the server does; else it reads nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest
from msgspec import structs

from fedplat.config import toml
from fedplat.model import Parameters
from fedplat.procedures import Means, NumericColumn, Procedure, ReplySchema, ReplyTensor, SiteTable, contract, versions
from fedplat.secure_aggregation.messages import SecureAggregation
from fedplat.secure_aggregation.setup import EXACT_FEATURE, ExactSetup, digest_task
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import Client, TrainResult
from fedplat_client._state import released
from fedplat_client.trainers.table import TableTrainer
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]
MEANS = Means({"age": NumericColumn(0, 120, 1)})
FRAME = {"age": [41, 67, 55, None]}


class Untouched:
    """A table that must not be read."""

    def __getitem__(self, name: str) -> NoReturn:
        raise AssertionError(f"the column {name} was read")


def setup(**changes: Any) -> fleet_pb2.ProcedureSetup:
    table = toml.to_table(MEANS)
    schema = MEANS.schema(versions.begin(MEANS).model)
    fields: dict[str, Any] = {"options": msgspec.json.encode(table), "version": 1, "schema_digest": schema.digest}
    return fleet_pb2.ProcedureSetup(**(fields | changes))


def assign(fleet: FakeFleet, step: fleet_pb2.ProcedureSetup, message: Parameters | None = None) -> None:
    model = fleet.add_model(versions.begin(MEANS).model if message is None else message)
    fleet.assign(model, procedure=step)


def test_a_reply_is_exact_and_recorded_and_the_client_states_that_it_answers(
    fleet: FakeFleet, make_client: MakeClient
) -> None:
    client = make_client(inline_limit_bytes=4096)
    client.add_trainer("digits", TableTrainer(FRAME))
    assign(fleet, setup())
    client.run(max_tasks=1)
    (check_in, *_) = fleet.requests["CheckIn"]
    assert contract.FEATURE in check_in.features
    (report,) = fleet.requests["Report"]
    message = versions.begin(MEANS).model
    schema = MEANS.schema(message)
    assert report.update == schema.write(schema.encode(MEANS.answer(message, SiteTable(FRAME))))
    assert schema.read(report.update).tolist() == [3, 1, 41 + 67 + 55 - 3 * 60, 19**2 + 7**2 + 5**2]
    assert (report.num_examples, dict(report.metrics)) == (1.0, {})
    (line,) = released.read(client.released)
    assert (line.content, line.round, line.size_bytes) == ("update", 1, len(report.update))


LIES: dict[str, tuple[dict[str, Any], model_pb2.Reason.ValueType, str]] = {
    "the reply schema": (
        {"schema_digest": bytes(32)},
        model_pb2.REASON_UNSAFE_AGGREGATION,
        "the server takes the replies for other numbers, bounds or steps than its options and message say",
    ),
    "the procedure's version": (
        {"version": 2},
        model_pb2.REASON_UNSAFE_AGGREGATION,
        "the server has version 2 of the procedure means, and this client version 1; upgrade the older one",
    ),
    "options that are not JSON": ({"options": b"{"}, model_pb2.REASON_UNSAFE_AGGREGATION, "its options cannot be read"),
    "an unknown option": (
        {"options": msgspec.json.encode(toml.to_table(MEANS) | {"max_row": 3})},
        model_pb2.REASON_UNSAFE_AGGREGATION,
        "its options cannot be read: Object contains unknown field",
    ),
    "too many options": (
        {"options": b" " * (2**18 + 1)},
        model_pb2.REASON_UNSAFE_AGGREGATION,
        "its options have 262,145 bytes; expected at most 262,144",
    ),
    "an unknown procedure": (
        {"options": b'{"kind":"trees"}'},
        model_pb2.REASON_UNKNOWN_TRAINER,
        "the client has no procedure 'trees'; it has means, covariances, counts: upgrade it, or add a plugin with "
        "--plugin procedures.NAME",
    ),
    "no procedure": ({"options": b"[1]"}, model_pb2.REASON_UNKNOWN_TRAINER, "the client has no procedure 'None'"),
}


def test_a_server_that_lies_gets_nothing_and_no_row_is_read(fleet: FakeFleet, make_client: MakeClient) -> None:
    client = make_client()
    client.add_trainer("digits", TableTrainer(Untouched()))
    client.add_trainer("other", lambda task: TrainResult(parameters=task.parameters, num_examples=1))
    for changes, *_ in LIES.values():
        assign(fleet, setup(**changes))
    assign(fleet, setup(), Parameters.from_arrays({"step": np.array([2])}))
    fleet.assign(fleet.add_model(versions.begin(MEANS).model), procedure=setup(), trainer="other")
    client.run(max_tasks=len(LIES) + 2)
    assert not fleet.requests["Report"]
    *lies, message, trainer = fleet.requests["Fail"]
    for name, failed in zip(LIES, lies, strict=True):
        _, reason, text = LIES[name]
        assert (failed.reason, text in failed.text) == (reason, True), (name, failed)
    assert message.text.startswith("the message does not fit the procedure: the message is not one of this procedure")
    assert trainer.text == "the trainer 'other' is a function, and the job asks a procedure; expected a TableTrainer"


def test_data_that_does_not_fit_is_told_without_a_value(fleet: FakeFleet, make_client: MakeClient) -> None:
    client = make_client()
    client.add_trainer("digits", TableTrainer({"age": [41, 150]}))
    assign(fleet, setup())
    fleet.assign(fleet.add_model(versions.begin(MEANS).model))
    client.run(max_tasks=2)
    refused, trained = fleet.requests["Fail"]
    assert refused.text == (
        "the procedure cannot be answered: 1 of 2 rows have values of column 'age' outside its declared range, from 0 "
        "to 120; correct the data, or declare another range"
    )
    assert trained.text.endswith("digits is a table, which only answers procedures; expected a job with [procedure]")


def exact_setup(fleet: FakeFleet, schema: ReplySchema, job_round: int, procedure: Procedure = MEANS) -> bytes:
    (digest,) = fleet.models
    task = digest_task("digits", "digits", versions.describe_task(versions.encode_options(procedure), 1))
    setup = ExactSetup("job-1", job_round, 1, digest, task, SecureAggregation(), schema.encoding(3), minimum=3)
    return setup.to_bytes()


def test_masks_for_other_bounds_or_options_are_refused(fleet: FakeFleet, make_client: MakeClient) -> None:
    client = make_client()
    client.add_trainer("digits", TableTrainer(Untouched()))
    model = fleet.add_model(versions.begin(MEANS).model)
    wider = ReplySchema((ReplyTensor("rows", bound=2.0**50, shape=(4,)),))
    fleet.assign(model, procedure=setup(), secure_setup=exact_setup(fleet, wider, 1))
    fleet.assign(model, procedure=setup(), secure_setup=b"no setup")
    # The others would send zeros, and the sum were the reply of this client.
    nobody = structs.replace(MEANS, where="age > 119")
    others = exact_setup(fleet, MEANS.schema(versions.begin(MEANS).model), 3, nobody)
    fleet.assign(model, procedure=setup(), secure_setup=others)
    client.run(max_tasks=3)
    assert EXACT_FEATURE in fleet.requests["CheckIn"][0].features
    bounds, unreadable, options = fleet.requests["Fail"]
    assert bounds.reason == unreadable.reason == options.reason == model_pb2.REASON_UNSAFE_AGGREGATION
    assert bounds.text == (
        "the secure aggregation is for replies of another size or other bounds than those of the procedure"
    )
    assert unreadable.text.startswith("the setup of the secure aggregation cannot be read")
    assert options.text.startswith("the secure aggregation is for the task digest")
    assert not fleet.requests["Step"]


@pytest.mark.parametrize("option", ["require_secure_aggregation", "require_local_noise"])
def test_an_owner_who_wants_masks_answers_nothing_without_them(
    fleet: FakeFleet, make_client: MakeClient, option: str
) -> None:
    client = make_client(**{option: True})
    client.add_trainer("digits", TableTrainer(Untouched()))
    assign(fleet, setup())
    client.run(max_tasks=1)
    (failed,) = fleet.requests["Fail"]
    assert failed.reason == model_pb2.REASON_UNSAFE_AGGREGATION
    assert "the owner of this client answers procedures only with secure aggregation" in failed.text
