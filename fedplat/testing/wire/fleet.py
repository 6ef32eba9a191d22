"""The scripted server, without sockets and clocks: it checks each call of a client, and answers as the case states.

Everything that a client does against the protocol is a sentence in `problems`, in whichever case it happens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from fedplat import claims, wire
from fedplat.errors import ModelError
from fedplat.model import Parameters
from fedplat.testing.wire import script
from fedplat.testing.wire.calls import (
    FINAL,
    MAX_CALLS,
    NAME,
    POPULATION,
    SECRET,
    CallChecks,
    RefusedCallError,
    Request,
)
from fedplat.testing.wire.script import DROPPED, NUM_EXAMPLES, REPORTED, TRAINER, Action, Case, ScriptedTask
from fedplat.wire import auth, digests
from fedplat.wire.v1 import fleet_pb2, model_pb2


@dataclass(frozen=True)
class ScriptedAnswer:
    """What the client gets, in the form of its transport."""

    body: bytes = b""
    """A serialized message, or the octets of a file."""
    is_file: bool = False
    refusal: RefusedCallError | None = None
    proxy_status: int = 0
    """If it is not 0, something before the server answers with this status of HTTP."""
    hold_s: float = 0.0
    """How long the answer is held back."""
    is_lost: bool = False
    cut_after: int | None = None
    """After how many bytes of the body the connection breaks."""
    kills: bool = False


@dataclass
class _Work:
    """The state of an assignment: open, or how it has ended."""

    task: ScriptedTask
    token: str
    began_at: float
    ends_at: float
    outcome: str = ""
    digest: str = ""


@dataclass
class _Log:
    """See `script.Sent`."""

    offsets: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    sizes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    progress: list[float] = field(default_factory=list)


class ScriptedFleet:
    """The server of one case. `take` serves a request; `is_over` is true once the client has done all of it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.checks = CallChecks()
        self.is_over = False
        self.has_evaluator = True
        self._log = _Log()
        self._client_id = ""
        self._works: list[_Work] = []
        self._files: dict[tuple[str, str], bytearray] = {}

    @property
    def problems(self) -> list[str]:
        """The sentences about calls that are against the protocol."""
        return self.checks.problems

    @property
    def ended_by(self) -> str:
        """The code after which the client must end; empty: it need not."""
        return self.checks.ended_by

    @property
    def sent(self) -> script.Sent:
        """The calls of the client so far."""
        log = self._log
        return script.Sent(offsets=log.offsets, counts=log.counts, sizes=log.sizes, progress=log.progress)

    @property
    def missing(self) -> str:
        """The rest of the case, which the client still has to do."""
        if self.checks.ended_by:
            return "the client did not end"
        for number, task in enumerate(self.case.tasks):
            if number >= len(self._works):
                return f"the client did not check in for its assignment {number + 1}"
            if not self._works[number].outcome:
                return f"the assignment {number + 1} did not end; expected {' or '.join(task.outcome)}"
        return "the client did not check in after its last assignment"

    def octet_limit(self, method: str) -> int | None:
        """Return after how many octets of the next upload the connection breaks; None: it does not."""
        action = self._action(method, self._log.counts[method] + 1)
        return action.num_bytes if isinstance(action, script.CutFile) and method == "Upload" else None

    def take(self, request: Request) -> ScriptedAnswer:
        """Serve a request."""
        method, counts = request.method, self._log.counts
        counts[method] += 1
        size = len(request.octets if method == "Upload" else request.message)
        self._log.sizes[method].append(size)
        if sum(counts.values()) > MAX_CALLS:
            self.checks.note(f"the client has made more than {MAX_CALLS} calls")
        action = self._action(method, counts[method])
        if isinstance(action, script.ProxyPage) and size >= action.from_bytes:
            return ScriptedAnswer(proxy_status=action.status)
        try:
            self.checks.check_form(request)
            self.checks.check_time(request)
            message = self.checks.read(request)
            return self._act(method, message, request, action)
        except RefusedCallError as exc:
            return self._refuse(method, exc, request.at_s)

    def _action(self, method: str, number: int) -> Action | None:
        return next((each.action for each in self.case.faults if each.applies(method, number)), None)

    def _act(self, method: str, message: Any, request: Request, action: Action | None) -> ScriptedAnswer:
        if isinstance(action, script.RefuseCall):
            self._forget(action.code, request)
            raise RefusedCallError(action.code, "", action.retry)
        if isinstance(action, script.Lose | script.Kill) and not action.is_served:
            return ScriptedAnswer(is_lost=True, kills=isinstance(action, script.Kill))
        if isinstance(action, script.SendNoWork | script.EndAssignment):
            return self._give_reason(method, action, request.at_s)
        keep = action.num_bytes if isinstance(action, script.KeepPart) else None
        answer = getattr(self, f"_on_{method.lower()}")(message, request, keep)
        if isinstance(answer, Message):
            answer = ScriptedAnswer(answer.SerializeToString())
        if isinstance(action, script.ChangeAnswer):
            return dataclasses.replace(answer, body=action.change(answer.body))
        if isinstance(action, script.CutFile) and (method == "Upload" or len(answer.body) > action.num_bytes):
            return dataclasses.replace(answer, is_lost=method == "Upload", cut_after=action.num_bytes)
        if isinstance(action, script.Lose | script.Kill):
            return ScriptedAnswer(is_lost=True, kills=isinstance(action, script.Kill))
        return answer

    def _forget(self, code: str, request: Request) -> None:
        """Lose what the server reports as lost."""
        if code == "SESSION_UNKNOWN":
            self.checks.lose_session(request.text(auth.METADATA_SESSION))
        elif code == "STALE_ASSIGNMENT":
            self._end(self._works[-1], DROPPED)
        elif code == "CLIENT_UNKNOWN":
            self._client_id = ""
        elif code == "UPLOAD_INCOMPLETE":
            self._files.clear()

    def _give_reason(
        self, method: str, action: script.SendNoWork | script.EndAssignment, at_s: float
    ) -> ScriptedAnswer:
        earliest, latest = action.retry
        refusal = fleet_pb2.Refusal(
            reason=action.reason,  # type: ignore[arg-type]
            text="a case of the conformance kit",
            retry=model_pb2.RetryWindow(min_s=earliest, max_s=latest),
        )
        self.checks.not_before["CheckIn"] = at_s + earliest, method
        if isinstance(action, script.SendNoWork):
            return ScriptedAnswer(self._check_in_response(refusal=refusal).SerializeToString())
        self._end(self._works[-1], DROPPED)
        if method == "Heartbeat":
            return ScriptedAnswer(fleet_pb2.HeartbeatResponse(stop=refusal).SerializeToString())
        return ScriptedAnswer(fleet_pb2.ReportResponse(refusal=refusal).SerializeToString())

    def _refuse(self, method: str, exc: RefusedCallError, at_s: float) -> ScriptedAnswer:
        if exc.code in FINAL:
            self.checks.ended_by = exc.code
        if exc.retry is not None:
            self.checks.not_before[method] = at_s + exc.retry[0], method
        return ScriptedAnswer(refusal=exc)

    # The methods. Each returns a message, or an answer.

    def _on_getchallenge(self, message: Any, request: Request, _: int | None) -> Message:
        self.checks.check_version(request.method, message)
        nonce = hashlib.sha256(f"nonce {self._log.counts['GetChallenge']}".encode()).digest() + bytes(24)
        self.checks.nonces[nonce] = b""
        return fleet_pb2.GetChallengeResponse(protocol_version=wire.PROTOCOL_VERSION, nonce=nonce)

    def _on_enroll(self, message: Any, request: Request, _: int | None) -> Message:
        self.checks.check_version("Enroll", message)
        self.checks.require(message.population == POPULATION, f"Enroll has the population {message.population!r}")
        self.checks.require(message.token == SECRET, "Enroll does not have the secret of the ticket")
        size = len(message.idempotency_key.encode())
        self.checks.require(8 <= size <= 200, f"the idempotency key has {size} bytes; expected 8 to 200")
        identity = message.idempotency_key, message.public_key
        self.checks.require(
            self.checks.identity in (None, identity),
            "a repeated Enroll has another idempotency key or another public key",
        )
        self.checks.identity, self._client_id = identity, self._client_id or "c-0123456789abcdef"
        return fleet_pb2.EnrollResponse(client_id=self._client_id)

    def _on_opensession(self, message: Any, request: Request, _: int | None) -> Message:
        self.checks.check_version("OpenSession", message)
        self.checks.require(
            message.client_id == self._client_id, f"OpenSession has the client id {message.client_id!r}"
        )
        session_id = f"session-{self._log.counts['OpenSession']}"
        self.checks.open_session(session_id)
        return fleet_pb2.OpenSessionResponse(session_id=session_id)

    def _check_in_response(self, **outcome: Any) -> fleet_pb2.CheckInResponse:
        return fleet_pb2.CheckInResponse(
            protocol_version=wire.PROTOCOL_VERSION, software_version="conformance", **outcome
        )

    def _on_checkin(self, message: Any, request: Request, _: int | None) -> Message:
        self._check_offer(message)
        assignment = self._next(request.at_s)
        if assignment is not None:
            return self._check_in_response(assignment=assignment)
        self.is_over = True
        retry = model_pb2.RetryWindow(min_s=60.0, max_s=60.0)
        refusal = fleet_pb2.Refusal(reason=model_pb2.REASON_NO_WORK, text="the case is over", retry=retry)
        return self._check_in_response(refusal=refusal)

    def _check_offer(self, message: Any) -> None:
        self.checks.check_version("CheckIn", message)
        names = [*message.trainers, *message.evaluators, *message.codecs, *message.algorithms, *message.features]
        wrong = [name for name in names if not NAME.fullmatch(name)]
        self.checks.require(not wrong, f"CheckIn has the name {wrong[0][:80]!r}" if wrong else "")
        self.checks.require(TRAINER in message.trainers, f"CheckIn has no trainer {TRAINER!r}")
        self.checks.require(0.0 <= message.wait_s <= 300.0, f"CheckIn waits {message.wait_s} s; expected 0 to 300")
        self.has_evaluator = TRAINER in message.evaluators

    def _next(self, at_s: float) -> fleet_pb2.Assignment | None:
        """Return the open assignment of the client, or its next one; None after the last one."""
        works = self._works
        if works and not works[-1].outcome:
            if at_s < works[-1].ends_at:
                return self._make_assignment(works[-1], at_s)
            self._end(works[-1], DROPPED)
        if len(works) == len(self.case.tasks):
            return None
        task = self.case.tasks[len(works)]
        work = _Work(task, f"token-{len(works) + 1}", at_s, 0.0)
        works.append(work)
        message = self._make_assignment(work, at_s)
        work.ends_at = at_s + message.training_timeout_s
        return message

    def _make_assignment(self, work: _Work, at_s: float) -> fleet_pb2.Assignment:
        task, content = work.task, work.task.model.to_bytes()
        message = fleet_pb2.Assignment(
            token=work.token,
            job_id="j-0123456789ab",
            job_name="conformance",
            round=self._works.index(work) + 1,
            attempt=1,
            task=fleet_pb2.TASK_EVALUATE if task.is_evaluation else fleet_pb2.TASK_TRAIN,
            trainer=TRAINER,
            model=model_pb2.ModelRef(version=1, digest=hashlib.sha256(content).hexdigest(), size_bytes=len(content)),
            config={name: _value(each) for name, each in task.config.items()},
            training_timeout_s=60.0,
            upload_timeout_s=60.0,
            heartbeat_s=5.0,
            model_bytes=content if task.is_inline else b"",
            digest_last=True,
            num_rounds=len(self.case.tasks),
            max_downloads=1,
        )
        task.alter(message)
        return message

    def _on_download(self, message: Any, request: Request, _: int | None) -> ScriptedAnswer:
        work = self._works[-1]
        content = work.task.model.to_bytes()
        known = message.digest == hashlib.sha256(content).hexdigest()
        self.checks.require(known, "Download has another digest than the assignment's model", "NO_SUCH_MODEL")
        content = work.task.served or content
        if self._log.counts["Download"] > 1 and work.task.served is not None and REPORTED in work.task.outcome:
            content = work.task.model.to_bytes()  # the second time it is right
        self._log.offsets["Download"].append(message.offset)
        fits = message.offset <= len(content)
        self.checks.require(fits, f"Download has the offset {message.offset}, beyond the file's end", "WRONG_OFFSET")
        end = message.offset + message.length if message.length else len(content)
        return ScriptedAnswer(content[message.offset : end], is_file=True)

    def _on_heartbeat(self, message: Any, request: Request, _: int | None) -> ScriptedAnswer:
        work = self._find(message.token, "Heartbeat")
        right = 0.0 <= message.progress <= 1.0
        self.checks.require(right, f"Heartbeat has the progress {message.progress}; expected 0 to 1")
        self._log.progress.append(message.progress)
        if work.outcome:
            stop = fleet_pb2.Refusal(reason=model_pb2.REASON_STALE, text="the assignment has ended")
            return ScriptedAnswer(fleet_pb2.HeartbeatResponse(stop=stop).SerializeToString())
        proceed = fleet_pb2.Continue(remaining_s=max(work.ends_at - request.at_s, 0.0))
        return ScriptedAnswer(fleet_pb2.HeartbeatResponse(proceed=proceed).SerializeToString(), hold_s=message.wait_s)

    def _on_queryupload(self, message: Any, request: Request, _: int | None) -> Message:
        self._require_open(message.token, "QueryUpload")
        name = self._upload_name("QueryUpload", message)
        return fleet_pb2.QueryUploadResponse(received_bytes=len(self._files.get((message.token, name), b"")))

    def _upload_name(self, method: str, message: Any) -> str:
        digest, upload_id = message.digest, message.upload_id
        self.checks.require(bool(digest) != bool(upload_id), f"{method} has a digest and an upload_id, or neither")
        right = re.fullmatch("[0-9a-f]{32}", upload_id) if upload_id else re.fullmatch("[0-9a-f]{64}", digest)
        self.checks.require(right, f"{method} has a digest or an upload_id that is not one")
        return upload_id or digest

    def _on_upload(self, message: Any, request: Request, keep: int | None) -> Message:
        header = message.header
        work = self._require_open(header.token, "Upload")
        name = self._upload_name("Upload", header)
        size = work.task.model.schema.uploaded.file_size_bytes
        same = header.size_bytes == size
        self.checks.require(same, f"Upload announces {header.size_bytes} bytes; expected {size}")
        stored = self._files.setdefault((header.token, name), bytearray())
        self._log.offsets["Upload"].append(header.offset)
        if header.offset != len(stored):
            raise RefusedCallError("WRONG_OFFSET")
        stored += request.octets[:keep]
        fits = len(stored) <= size
        self.checks.require(fits, f"Upload has sent {len(stored)} bytes of {size}")
        return fleet_pb2.UploadResponse(received_bytes=len(stored))

    def _on_report(self, message: Any, request: Request, _: int | None) -> Message:
        work = self._find(message.token, "Report")
        receipt = fleet_pb2.Receipt(job_id="j-0123456789ab", round=1, attempt=1, digest=message.digest)
        if work.outcome == REPORTED:
            self.checks.require(work.digest == message.digest, "a repeated Report has another digest")
            return fleet_pb2.ReportResponse(receipt=receipt)
        self.checks.require(
            not work.outcome, f"the client reports an assignment that has ended ({work.outcome})", "STALE_ASSIGNMENT"
        )
        self.checks.require(request.at_s < work.ends_at + 60.0, "the client reports after its deadline")
        self.checks.require(
            message.num_examples == NUM_EXAMPLES, f"Report has {message.num_examples:g} examples; expected 7"
        )
        self.checks.require(
            not claims.check_metrics(dict(message.metrics)), claims.check_metrics(dict(message.metrics))
        )
        if work.task.is_evaluation:
            self.checks.require(not message.digest and not message.update, "the report of an evaluation has an update")
        else:
            self._check_update(work, message)
        work.digest = message.digest
        self._end(work, REPORTED)
        response = fleet_pb2.ReportResponse(receipt=receipt)
        if message.HasField("check_in"):
            offered = self._make_assignment(work, request.at_s).check_in_with_report
            self.checks.require(offered, "Report has a check-in, which the assignment does not offer")
            self._check_offer(message.check_in)
            if (following := self._next(request.at_s)) is not None:
                response.next.CopyFrom(following)
        return response

    def _check_update(self, work: _Work, message: Any) -> None:
        content = message.update
        if content:
            fits = len(content) <= wire.INLINE_BYTES
            self.checks.require(fits, f"Report has an update of {len(content)} bytes; at most {wire.INLINE_BYTES} fit")
        else:
            stored = self._files.get((work.token, message.upload_id or message.digest), b"")
            if len(stored) != work.task.model.schema.uploaded.file_size_bytes:
                raise RefusedCallError("UPLOAD_INCOMPLETE", "", (0.0, 0.1))
            content = bytes(stored)
        right = digests.is_digest(message.digest) and message.digest == hashlib.sha256(content).hexdigest()
        self.checks.require(right, "the digest of Report is not that of the update")
        base = work.task.model
        problem = describe_difference(content, script.train(base).uploaded.minus(base.uploaded))
        self.checks.require(not problem, f"the update is wrong: {problem}")

    def _on_fail(self, message: Any, request: Request, _: int | None) -> Message:
        work = self._find(message.token, "Fail")
        name = model_pb2.Reason.Name(message.reason).removeprefix("REASON_")
        self.checks.require(message.text, "Fail has no text")
        if work.outcome != name:
            ended = f"the client fails an assignment ({name}: {message.text[:200]}) that has ended ({work.outcome})"
            self.checks.require(not work.outcome, ended)
            self._end(work, name)
        if self.case.stops:
            self.is_over = True
        return fleet_pb2.FailResponse()

    def _find(self, token: str, method: str) -> _Work:
        found = next((work for work in self._works if work.token == token), None)
        self.checks.require(found, f"{method} has a token that the server did not issue", "STALE_ASSIGNMENT")
        assert found is not None
        return found

    def _require_open(self, token: str, method: str) -> _Work:
        work = self._find(token, method)
        ended = f"the client calls {method} for an assignment that has ended ({work.outcome})"
        self.checks.require(not work.outcome, ended, "STALE_ASSIGNMENT")
        return work

    def _end(self, work: _Work, outcome: str) -> None:
        work.outcome = outcome
        if outcome not in work.task.outcome:
            self.checks.note(f"the assignment ended with {outcome}; expected {' or '.join(work.task.outcome)}")


def describe_difference(content: bytes, expected: Parameters) -> str:
    """Return how an update differs from the expected one; empty if it does not."""
    right = expected.to_bytes()
    if content == right:
        return ""
    try:
        found = Parameters.from_bytes(content)
    except ModelError as exc:
        return str(exc)
    if difference := found.schema.difference_from(expected.schema):
        return difference
    if not content.startswith(expected.schema.header):
        return "the header is not byte for byte the expected one"
    for name, values in expected.items():
        if found[name].tobytes() != values.tobytes():
            shown = f"{found[name].reshape(-1)[:3].tolist()}; expected {values.reshape(-1)[:3].tolist()}"
            return f"the tensor {name!r} begins with {shown}"
    return "it has other bytes"


def _value(value: bool | int | float | str) -> model_pb2.Value:
    name = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}[type(value)]
    return model_pb2.Value(**{name: value})  # type: ignore[arg-type]
