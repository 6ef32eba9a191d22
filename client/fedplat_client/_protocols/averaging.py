"""A client's part in jobs whose server gets its update, and in evaluations, which have none."""

from __future__ import annotations

from fedplat.client_state import ClientState
from fedplat.codecs.container import Format
from fedplat.wire import digests
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._work import heartbeat, training
from fedplat_client._work.content import Content, Outgoing, StreamedUpdate
from fedplat_client._work.work import AssignedWork, Trained
from fedplat_client.task import EvaluateResult, TrainResult


def train(work: AssignedWork) -> heartbeat.CheckInResult:
    """Train, send the update, and report it."""
    if work.options.require_secure_aggregation or work.options.requires_noise:
        raise heartbeat.AssignmentFailedError(
            model_pb2.REASON_UNSAFE_AGGREGATION,
            "the owner of this client allows training only with secure aggregation; the job has none",
        )
    with work.heartbeat():
        request, content, client_state = _compute(work)
        work.send(request, content, client_state)
    work.control.signal.check()
    return work.report(request, content)


def evaluate(work: AssignedWork) -> heartbeat.CheckInResult:
    """Evaluate the model, and report the metrics."""
    with work.heartbeat():
        trained = work.run(work.parts.trainers.find_evaluator(work.assignment.trainer), "evaluate")
        request = make_report(work, trained.result)
        del trained
    work.control.signal.check()
    return work.report(request)


def make_report(work: AssignedWork, result: TrainResult | EvaluateResult) -> fleet_pb2.ReportRequest:
    """Return the report of a result, without an update."""
    return fleet_pb2.ReportRequest(
        token=work.assignment.token, num_examples=result.num_examples, metrics=result.metrics
    )


def _compute(work: AssignedWork) -> tuple[fleet_pb2.ReportRequest, Outgoing, ClientState]:
    """Run the trainer. The copies of the model are freed when this returns, unless the update is computed later."""
    trained = work.run(work.parts.trainers.find_trainer(work.assignment.trainer), "train")
    return make_report(work, trained.result), _encode(work, trained), trained.client_state


def _encode(work: AssignedWork, trained: Trained[TrainResult]) -> Outgoing:
    """Return what to send: the update, encoded if the job has a codec, else computed while it is sent if possible."""
    control, result, base = work.control, trained.result, trained.base
    turn = training.read_turn(work.assignment)
    codec = training.read_codec(work.assignment, work.parts.trainers.plugins)
    if codec is None:
        is_large = base.schema.file_size_bytes > work.options.inline_limit_bytes
        if work.assignment.digest_last and is_large and not turn.groups:
            difference = training.fit_model(control, lambda: result.to_difference(base))
            if difference is not None:
                uses_blake3 = work.assignment.blake3 and digests.has_blake3()
                return StreamedUpdate(difference, digests.BLAKE3 if uses_blake3 else "")
        return Content(training.fit_model(control, lambda: turn.leave_out(result.to_update(base)).pieces))
    update = training.fit_model(control, lambda: result.to_update(base))
    seed = work.options.rng.getrandbits(128)
    with training.guard(control, "the trainer's result cannot be encoded"):
        form, residuals = Format(codec, base.schema), work.parts.residuals
        return training.encode(work.assignment, update, form, seed, residuals, trained.merged)
