"""A client's part in jobs with a procedure: it answers a message with sums of its table.

The client computes the form of its reply itself, from the options of the procedure and the message. What the server
takes a reply for must be the same, or nothing is read from the table. So a server that lies about the procedure, its
version, or the bounds and steps of a reply gets none.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fedplat.config.plugins import Plugins
from fedplat.errors import FedplatError
from fedplat.model import Parameters
from fedplat.procedures import PROCEDURE, Procedure, ReplySchema, contract, versions
from fedplat.procedures.sums import Integers
from fedplat.secure_aggregation.setup import ExactSetup
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._protocols import secure
from fedplat_client._work import heartbeat, training
from fedplat_client._work.content import Content
from fedplat_client._work.heartbeat import AssignmentFailedError
from fedplat_client._work.work import AssignedWork

_MAX_OPTIONS_BYTES = 2**18


def answer(work: AssignedWork) -> heartbeat.CheckInResult:
    """Answer a message, send the reply, and report it."""
    if work.options.require_secure_aggregation or work.options.requires_noise:
        raise AssignmentFailedError(
            model_pb2.REASON_UNSAFE_AGGREGATION,
            "the owner of this client answers procedures only with secure aggregation; the job has none",
        )
    request = fleet_pb2.ReportRequest(token=work.assignment.token, num_examples=1)
    with work.heartbeat():
        schema, reply = _compute(work, lambda schema: None)
        content = Content((memoryview(schema.write(reply)),))
        work.deliver(request, content)
    work.control.signal.check()
    return work.report(request, content)


def answer_masked(work: AssignedWork) -> heartbeat.CheckInResult:
    """Answer a message, send the reply under masks, report it, and help to remove the masks from the sum."""
    asked = work.assignment.procedure
    task = versions.describe_task(asked.options, asked.version)
    exchange = secure.open_exchange(work, ExactSetup.from_bytes, task)
    request = fleet_pb2.ReportRequest(token=work.assignment.token, num_examples=1)
    with work.heartbeat():
        _, reply = _compute(work, exchange.check_schema)
        exchange.encode_reply(reply)
        del reply
        work.control.trained = True
        with work.span("share"):
            content = exchange.mask()
        work.deliver(request, content, exchange.protection)
    work.control.signal.check()
    outcome = work.report(request, content)
    del request, content  # the other sites may take long
    return secure.finish(work, outcome, exchange)


def _compute(work: AssignedWork, check: Callable[[ReplySchema], None]) -> tuple[ReplySchema, Integers]:
    """Return the form of the reply, which `check` may refuse, and the reply as integers.

    Raises `AssignmentFailedError` and `Cancelled`.
    """
    procedure = read_procedure(work.assignment.procedure, work.parts.trainers.plugins)
    read = work.parts.trainers.find_table(work.assignment.trainer)
    with work.span("download"):
        message, _ = work.parts.downloader.load(work.assignment, work.control)
    schema = check_step(work, procedure, message)
    check(schema)
    with work.span("answer"), training.guard(work.control, "the procedure cannot be answered"):
        reply = schema.encode(read(procedure, message))
    work.control.signal.check()  # after a stop, the reply does not count
    return schema, reply


def read_procedure(setup: fleet_pb2.ProcedureSetup, plugins: Plugins) -> Procedure:
    """Return the procedure of an assignment. Raises `AssignmentFailedError` if the client has it in another version."""
    if len(setup.options) > _MAX_OPTIONS_BYTES:
        raise _refuse(f"its options have {len(setup.options):,} bytes; expected at most {_MAX_OPTIONS_BYTES:,}")
    try:
        table = msgspec.json.decode(setup.options)
        name = table.get(PROCEDURE.key) if isinstance(table, dict) else None
        if not isinstance(name, str) or plugins.find(PROCEDURE, name) is None:
            raise AssignmentFailedError(
                model_pb2.REASON_UNKNOWN_TRAINER,
                f"the client has no procedure {str(name)[:100]!r}; it has {', '.join(plugins.names(PROCEDURE))}: "
                "upgrade it, or add a plugin with --plugin procedures.NAME",
            )
        procedure: Procedure = plugins.decode(PROCEDURE.contract, table)
    except (msgspec.MsgspecError, FedplatError, ValueError) as exc:
        if isinstance(exc, AssignmentFailedError):
            raise
        raise _refuse(f"its options cannot be read: {exc}") from exc
    if setup.version != (version := contract.version_of(procedure)):
        raise _refuse(
            f"the server has version {setup.version} of the procedure {name}, and this client version {version}; "
            "upgrade the older one"
        )
    return procedure


def check_step(work: AssignedWork, procedure: Procedure, message: Parameters) -> ReplySchema:
    """Return the form of the reply to a message. Raises `AssignmentFailedError` if the server has another one."""
    with training.guard(work.control, "the message does not fit the procedure"):
        schema = procedure.schema(message)
    if schema.digest != work.assignment.procedure.schema_digest:
        raise _refuse(
            "the server takes the replies for other numbers, bounds or steps than its options and message say"
        )
    return schema


def _refuse(text: str) -> AssignmentFailedError:
    return AssignmentFailedError(model_pb2.REASON_UNSAFE_AGGREGATION, f"the procedure was not answered: {text}")
