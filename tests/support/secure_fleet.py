"""A scripted server of secure aggregation on a real socket: one attempt, with drop-outs and lies as planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from fedplat.secure_aggregation import encoding, unmasking
from fedplat.secure_aggregation.messages import (
    Confirmation,
    KeyAdvertisement,
    Member,
    SealedShares,
    Survivors,
    UnmaskAnswer,
)
from fedplat.secure_aggregation.setup import Graph, Setup
from fedplat.wire.v1 import fleet_pb2, model_pb2
from support.fake_fleet import FakeFleet

LIMIT_S = 60.0
"""The longest time that a call waits; it only ends a test that would hang."""


class SecureFleet(FakeFleet):
    """The attempt has `size` clients, which say their number in a label; client 2 gets the assignment "token-2".

    Clients in `gone` are not waited for any more.
    """

    def __init__(self, setup: Setup, size: int) -> None:
        super().__init__()
        self.setup = setup
        self.size = size
        self.gone: set[str] = set()
        # What the test plans: for the token and the kind of a message, or for a kind of an answer.
        self.refusals: dict[tuple[str, str], model_pb2.Reason.ValueType] = {}
        self.broken: set[tuple[str, str]] = set()
        self.lies: dict[str, Callable[[str, bytes], bytes]] = {}
        self.answer_kinds: dict[tuple[str, str], str] = {}
        self.on_message: Callable[[str, str], None] = lambda token, kind: None
        self.waiting_s = LIMIT_S
        # What clients sent.
        self.messages: dict[tuple[str, str], list[bytes]] = defaultdict(list)
        self.public_keys: dict[str, bytes] = {}
        self.members: dict[str, Member] = {}
        self.roster: list[str] = []
        self.sent: dict[int, SealedShares] = {}
        self.digests: dict[str, str] = {}
        self.survivors: Survivors | None = None
        self.confirmations: dict[int, Confirmation] = {}
        self.answers: dict[int, UnmaskAnswer] = {}

    @property
    def graph(self) -> Graph:
        return Graph.of(self.setup.options, len(self.roster))

    def drop(self, token: str) -> None:
        """Does not wait for a client any more."""
        with self.changed:
            self.gone.add(token)
            self.changed.notify_all()

    def restart(self) -> None:
        """Forgets what is in the memory of a real server, so that it can be served again."""
        self.closing = False
        self.sessions.clear()

    def wait_for_message(self, kind: str, count: int) -> None:
        """Waits until `count` clients have sent a message of a kind."""
        with self.changed:
            assert self.changed.wait_for(lambda: self._count(kind) >= count, timeout=LIMIT_S), self.messages.keys()

    def _count(self, kind: str) -> int:
        return sum(name == kind for _, name in self.messages)

    def read_masked(self, token: str, folder: Path) -> npt.NDArray[np.uint32]:
        """The masked vector that a client has uploaded."""
        vector = np.zeros(self.setup.encoding.length, np.uint32)
        path = folder / token
        path.write_bytes(self.uploads[self.digests[token]])
        encoding.check_file(path, self.setup)
        encoding.add_file(path, self.setup, vector)
        return vector

    def unmask(self, folder: Path) -> tuple[npt.NDArray[np.uint32], list[str]]:
        """The sum of the survivors' vectors, and their tokens."""
        assert self.survivors is not None
        total = np.zeros(self.setup.encoding.length, np.uint32)
        tokens = [self.roster[position] for position in self.survivors.survivors]
        for token in tokens:
            total += self.read_masked(token, folder)
        members = [self.members[token] for token in self.roster]
        wrong = unmasking.remove_masks(self.setup, members, self.sent, self.survivors, self.answers, total)
        assert not wrong
        return total, tokens

    def Enroll(self, request: fleet_pb2.EnrollRequest, context: Any) -> fleet_pb2.EnrollResponse:
        self.public_keys[_token(request.labels)] = request.public_key
        return super().Enroll(request, context)

    def CheckIn(self, request: fleet_pb2.CheckInRequest, context: Any) -> fleet_pb2.CheckInResponse:
        self._enter("CheckIn", request, context)
        with self.changed:
            for response in self.work:
                if response.assignment.token == _token(request.labels):
                    self.work.remove(response)
                    return response
        refusal = fleet_pb2.Refusal(reason=model_pb2.REASON_NO_WORK, retry=model_pb2.RetryWindow())
        return fleet_pb2.CheckInResponse(refusal=refusal)

    def Report(self, request: fleet_pb2.ReportRequest, context: Any) -> fleet_pb2.ReportResponse:
        response = super().Report(request, context)
        with self.changed:
            if (reason := self.refusals.get((request.token, "report"))) is not None:
                self.gone.add(request.token)
                response = fleet_pb2.ReportResponse(refusal=fleet_pb2.Refusal(reason=reason, text="not this one"))
            elif response.HasField("receipt"):
                self.digests[request.token] = request.digest
            self.changed.notify_all()
        return response

    def Fail(self, request: fleet_pb2.FailRequest, context: Any) -> fleet_pb2.FailResponse:
        response = super().Fail(request, context)
        self.drop(request.token)
        return response

    def Step(self, request: fleet_pb2.StepRequest, context: Any) -> fleet_pb2.StepResponse:
        self._enter("Step", request, context)
        token, kind = request.token, request.secure.WhichOneof("message") or "none"
        self.on_message(token, kind)
        if (token, kind) in self.broken:
            self.drop(token)
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        with self.changed:
            self.messages[token, kind].append(b"" if kind == "none" else getattr(request.secure, kind))
            ended = model_pb2.REASON_STALE if token in self.gone else None
            if (reason := self.refusals.get((token, kind), ended)) is not None:
                self.gone.add(token)
                self.changed.notify_all()
                return fleet_pb2.StepResponse(refusal=fleet_pb2.Refusal(reason=reason, text="not this one"))
            self._receive(token, kind, self.messages[token, kind][-1])
            self.changed.notify_all()
        self._wait(context, min(request.wait_s, self.waiting_s), lambda: self._is_ready(kind))
        with self.changed:
            if not self._is_ready(kind):
                waiting = fleet_pb2.Waiting(remaining_s=LIMIT_S)
                return fleet_pb2.StepResponse(waiting=waiting)
            answer, content = self._answer(token, kind)
            answer = self.answer_kinds.get((token, kind), answer)
        self._leave("Step", context)
        if answer == "done":
            return fleet_pb2.StepResponse(done=fleet_pb2.Done())
        lie = self.lies.get(answer)
        return fleet_pb2.StepResponse(secure=fleet_pb2.SecureInput(**{answer: lie(token, content) if lie else content}))  # type: ignore[arg-type]

    def _receive(self, token: str, kind: str, content: bytes) -> None:
        position = self.roster.index(token) if token in self.roster else -1
        match kind:
            case "keys":
                keys = KeyAdvertisement.from_bytes(content)
                unmasking.check_keys(self.setup, self.public_keys[token], keys)
                self.members[token] = Member(f"client of {token}", self.public_keys[token], keys)
            case "shares":
                shares = SealedShares.from_bytes(content)
                unmasking.check_shares(self.graph, position, shares)
                self.sent[position] = shares
            case "confirmation":
                assert self.survivors is not None
                confirmation = Confirmation.from_bytes(content)
                members = [self.members[each] for each in self.roster]
                unmasking.check_confirmation(self.setup, members, position, self.survivors, confirmation)
                self.confirmations[position] = confirmation
            case "answer":
                assert self.survivors is not None
                answer = UnmaskAnswer.from_bytes(content)
                unmasking.check_answer(self.graph, position, self.survivors, answer)
                self.answers[position] = answer
            case _:
                pass

    def _is_ready(self, kind: str) -> bool:
        """Whether the input of the step after a message is there; fixes the roster and the survivors."""
        match kind:
            case "keys":
                if not self.roster and len(self.members.keys() | self.gone) >= self.size:
                    self.roster = sorted(self.members.keys() - self.gone)
                return bool(self.roster)
            case "shares":
                return all(self.roster.index(each) in self.sent or each in self.gone for each in self.roster)
            case "none":
                sharers = {self.roster[position] for position in self.sent}
                if self.survivors is None and sharers <= self.digests.keys() | self.gone:
                    reported = {self.roster.index(token) for token in self.digests}
                    dropped = self.sent.keys() - reported
                    self.survivors = Survivors(tuple(sorted(reported)), tuple(sorted(dropped)))
                return self.survivors is not None
            case "confirmation":
                assert self.survivors is not None
                return all(
                    position in self.confirmations or self.roster[position] in self.gone
                    for position in self.survivors.survivors
                )
            case _:
                return True

    def _answer(self, token: str, kind: str) -> tuple[str, bytes]:
        """The answer to a message."""
        position = self.roster.index(token)
        match kind:
            case "keys":
                return "roster", unmasking.make_roster([self.members[each] for each in self.roster], position)
            case "shares":
                return "shares", unmasking.route_shares(self.graph, position, self.sent)
            case "none" if self.setup.options.confirm:
                assert self.survivors is not None
                return "survivors", self.survivors.to_bytes()
            case "none" | "confirmation":
                assert self.survivors is not None
                return "unmask", unmasking.make_request(self.survivors, self.confirmations)
            case _:
                return "done", b""


def _token(labels: Mapping[str, str]) -> str:
    return f"token-{labels['number']}"
