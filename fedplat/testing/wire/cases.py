"""The cases of conformance, as data. Their names are stable: programs list those that they know to fail."""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import Any

import ml_dtypes
import numpy as np

from fedplat.model import Parameters
from fedplat.testing.wire.script import (
    ALWAYS,
    DROPPED,
    REPORTED,
    Case,
    ChangeAnswer,
    CutFile,
    EndAssignment,
    Fault,
    KeepPart,
    Kill,
    Lose,
    ProxyPage,
    RefuseCall,
    ScriptedTask,
    SendNoWork,
    Sent,
)
from fedplat.wire.v1 import fleet_pb2, gossip_pb2, model_pb2

_MIB = 2**20
_SMALL = Parameters.from_arrays({"weight": np.array([[0.5, -1.25], [3.0, 1e7]], np.float32)})
_TYPES = Parameters.from_arrays(
    {
        "mask": np.array([True, False, True]),
        "steps": np.array([7], np.int64),
        "wide": np.array([0.1, 0.2], np.float64),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(0.1, np.float32),
        "half": np.array([0.25, 2049.0, -0.333, 6e-8], np.float16),
        "brain": np.array([1.0, 255.0, 256.0, -3.140625], ml_dtypes.bfloat16),
        "bytes": np.array([0, 255], np.uint8),
    },
    "max",
)
_OWNED = Parameters.from_arrays({"w": np.array([1.0], np.float32), "server/m": np.array([9.0], np.float32)})
_UNKNOWN_FIELDS = bytes.fromhex("f8ff0701") + bytes.fromhex("fabf3f03616263")
"""A number and a text, with tags that no message has."""
_SOON = (0.05, 0.1)
_WINDOW = (1.0, 1.5)


@functools.cache
def _large(num_mib: int) -> Parameters:
    return Parameters.from_arrays({"weight": np.arange(num_mib * _MIB // 4, dtype=np.float32)})


def _small(*outcome: str, **options: Any) -> tuple[ScriptedTask]:
    return (ScriptedTask(model=_SMALL, outcome=outcome or (REPORTED,), **options),)


def _of(model: Parameters, *outcome: str, **options: Any) -> tuple[ScriptedTask]:
    return (ScriptedTask(model=model, outcome=outcome or (REPORTED,), is_inline=False, **options),)


def _set(**fields: Any) -> Any:
    """Return what sets fields of an assignment."""

    def alter(assignment: fleet_pb2.Assignment) -> None:
        assignment.MergeFrom(fleet_pb2.Assignment(**fields))

    return alter


def _damage(assignment: fleet_pb2.Assignment) -> None:
    assignment.model_bytes = assignment.model_bytes[:-1] + b"\x7f"


def _leave_a_gap(assignment: fleet_pb2.Assignment) -> None:
    text = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    assignment.model_bytes = content = len(text).to_bytes(8, "little") + text + bytes(8)
    assignment.model.digest, assignment.model.size_bytes = hashlib.sha256(content).hexdigest(), len(content)


def _announce_less(assignment: fleet_pb2.Assignment) -> None:
    assignment.model.size_bytes -= 8


def _flip(model: Parameters) -> bytes:
    content = bytearray(model.to_bytes())
    content[-1] ^= 1
    return bytes(content)


def _resumes(method: str, num_breaks: int) -> Any:
    """Return a check that each transfer after a break continues where the one before ended."""

    def check(sent: Sent) -> str:
        offsets = sent.offsets.get(method, [])
        if len(offsets) <= num_breaks or any(later <= earlier for earlier, later in itertools.pairwise(offsets)):
            return f"{method} has the offsets {offsets} after breaks; expected that each one continues"
        return ""

    return check


def _asks_first(sent: Sent) -> str:
    return "" if sent.counts.get("QueryUpload") else "the client did not call QueryUpload to find where to continue"


def _enrolls_once(sent: Sent) -> str:
    found = sent.counts.get("Enroll", 0)
    return "" if found == 1 else f"the client enrolled {found} times; expected once"


def _shorten(assignment: fleet_pb2.Assignment) -> None:
    assignment.training_timeout_s, assignment.upload_timeout_s = 1.0, 1.0


def _sends_small_pieces(sent: Sent) -> str:
    sizes = [size for size in sent.sizes.get("Upload", []) if size > 512 * 2**10]
    return "" if len(sizes) <= 1 else f"the client sent pieces of {max(sizes)} bytes after the status 413"


def _shows_progress(sent: Sent) -> str:
    return "" if len(sent.progress) >= 2 else f"the client sent {len(sent.progress)} heartbeats in 2 s; expected 2"


_TRAINING = (
    Case(name="round", rule="a client enrolls, trains a small model and reports it", tasks=_small()),
    Case(
        name="two_rounds",
        rule="a client checks in again after its report, in the same session",
        tasks=_small() * 2,
        check=lambda sent: "" if sent.counts["OpenSession"] == 1 else "the client opened more than one session",
    ),
    Case(
        name="types",
        rule="entries of all types are read and written as the page says",
        tasks=(ScriptedTask(model=_TYPES),),
    ),
    Case(
        name="server_tensors",
        rule="tensors of the server are no part of an update",
        tasks=(ScriptedTask(model=_OWNED),),
    ),
    Case(name="evaluation", rule="an evaluation reports numbers, and no update", tasks=_small(is_evaluation=True)),
    Case(name="large_model", rule="a model of 20 MiB is downloaded, and its update uploaded", tasks=_of(_large(20))),
    Case(
        name="next_assignment",
        rule="a report may have the next check-in if the assignment offers it, and its answer the next assignment",
        tasks=_small(alter=_set(check_in_with_report=True)) * 2,
    ),
    Case(
        name="heartbeats",
        rule="a client that works sends heartbeats with its progress",
        tasks=_small(config={"seconds": 2.0}, alter=_set(heartbeat_s=0.5)),
        check=_shows_progress,
    ),
    Case(
        name="unknown_fields",
        rule="fields that a client does not know are ignored",
        tasks=_small(),
        faults=(Fault("*", ChangeAnswer(lambda body: body + _UNKNOWN_FIELDS), last=ALWAYS),),
    ),
    Case(
        name="unknown_reason",
        rule="a reason that a client does not know is a refusal like others",
        tasks=_small(),
        faults=(Fault("CheckIn", SendNoWork(9999, _SOON)),),
    ),
    Case(
        name="large_message",
        rule="messages of up to 8 MiB are accepted",
        tasks=_small(config={"padding": "x" * (8 * _MIB - 4096)}),
    ),
)
_DOWNLOADS = (
    Case(
        name="download_cut",
        rule="a download that breaks continues where it ended",
        tasks=_of(_large(4)),
        faults=(Fault("Download", CutFile(_MIB), last=ALWAYS),),
        check=_resumes("Download", 3),
    ),
    Case(
        name="download_damaged",
        rule="a file with another digest is not used: it is downloaded again, or the assignment fails",
        tasks=_of(_large(1), REPORTED, "TRANSFER_FAILED", served=_flip(_large(1))),
    ),
    Case(
        name="download_too_long",
        rule="more bytes than the assignment announces are refused",
        tasks=_of(_large(1), "TRANSFER_FAILED", alter=_announce_less),
    ),
    Case(
        name="model_damaged",
        rule="a model that is sent with its assignment is checked by its digest",
        tasks=_small("TRANSFER_FAILED", alter=_damage),
    ),
    Case(
        name="model_invalid",
        rule="a file that is not a model is refused",
        tasks=_small("TRANSFER_FAILED", alter=_leave_a_gap),
    ),
)
_UPLOADS = (
    Case(
        name="upload_cut",
        rule="an upload that breaks continues where it ended, which QueryUpload says",
        tasks=_of(_large(4)),
        faults=(Fault("Upload", CutFile(_MIB), last=3),),
        check=lambda sent: _asks_first(sent) or _resumes("Upload", 1)(sent),
    ),
    Case(
        name="upload_kept_in_part",
        rule="an upload of which the server has kept a part continues there",
        tasks=_of(_large(4)),
        faults=(Fault("Upload", KeepPart(_MIB), last=2),),
        check=_resumes("Upload", 2),
    ),
    Case(
        name="upload_offset",
        rule="after WRONG_OFFSET a client asks where to continue",
        tasks=_of(_large(1)),
        faults=(Fault("Upload", RefuseCall("WRONG_OFFSET")),),
        check=_asks_first,
    ),
    Case(
        name="upload_busy",
        rule="a client waits within the retry window if the server has no room for its upload",
        tasks=_of(_large(1)),
        faults=(Fault("Upload", RefuseCall("TOO_MANY_UPLOADS", _WINDOW)),),
    ),
    Case(
        name="upload_lost",
        rule="if a report is refused with UPLOAD_INCOMPLETE, the update is uploaded and reported again",
        tasks=_of(_large(1)),
        faults=(Fault("Report", RefuseCall("UPLOAD_INCOMPLETE", _SOON)),),
    ),
    Case(
        name="upload_too_large_for_a_proxy",
        rule="after the status 413 of a proxy, pieces have at most 512 KiB",
        tasks=_of(_large(2)),
        faults=(Fault("Upload", ProxyPage(413, 600 * 2**10), last=ALWAYS),),
        transports=("http",),
        check=_sends_small_pieces,
    ),
    Case(
        name="upload_ended",
        rule="after STALE_ASSIGNMENT a client drops its work, and checks in",
        tasks=_of(_large(1), DROPPED),
        faults=(Fault("Upload", RefuseCall("STALE_ASSIGNMENT")),),
    ),
)
_LOST_SESSIONS = tuple(
    Case(
        name=f"session_lost_in_{name}",
        rule=f"after SESSION_UNKNOWN a client opens another session, and calls {method} again",
        tasks=_of(_large(1)),
        faults=(Fault(method, RefuseCall("SESSION_UNKNOWN")),),
    )
    for name, method in (("check_in", "CheckIn"), ("download", "Download"), ("upload", "Upload"), ("report", "Report"))
)
_ACCESS = (
    *_LOST_SESSIONS,
    Case(
        name="replayed",
        rule="after REPLAYED a client signs the call again in another session",
        tasks=_small(),
        faults=(Fault("CheckIn", RefuseCall("REPLAYED")),),
    ),
    Case(
        name="nonce_expired",
        rule="after CHALLENGE_EXPIRED a client requests another nonce",
        tasks=_small(),
        faults=(
            Fault("Enroll", RefuseCall("CHALLENGE_EXPIRED")),
            Fault("OpenSession", RefuseCall("CHALLENGE_EXPIRED")),
        ),
    ),
    Case(
        name="client_unknown",
        rule="a client that the server does not know enrolls again with the same keys",
        tasks=_small(),
        faults=(Fault("OpenSession", RefuseCall("CLIENT_UNKNOWN")),),
    ),
    Case(
        name="fenced",
        rule="a client ends when another process uses its key",
        tasks=_small(),
        faults=(Fault("CheckIn", RefuseCall("FENCED"), last=ALWAYS),),
        is_last=True,
    ),
    Case(
        name="revoked",
        rule="a client ends when it is revoked",
        tasks=_small(),
        faults=(Fault("CheckIn", RefuseCall("REVOKED"), last=ALWAYS),),
        is_last=True,
    ),
    Case(
        name="ticket_refused",
        rule="a client ends when its ticket is not valid any more",
        tasks=_small(),
        faults=(Fault("Enroll", RefuseCall("TOKEN_REFUSED"), last=ALWAYS),),
        is_last=True,
    ),
    Case(
        name="version_refused",
        rule="a client ends when the server does not speak its version of the protocol",
        tasks=_small(),
        faults=(Fault("CheckIn", RefuseCall("UNSUPPORTED_VERSION"), last=ALWAYS),),
        is_last=True,
    ),
)
_BREAKS = (
    Case(
        name="unavailable",
        rule="a client waits within the retry window of a server that is not available",
        tasks=_small(),
        faults=(Fault("CheckIn", RefuseCall("DRAINING", _WINDOW)),),
    ),
    Case(
        name="no_work",
        rule="a client waits within the retry window of a check-in without an assignment",
        tasks=_small(),
        faults=(Fault("CheckIn", SendNoWork(model_pb2.REASON_NO_WORK, _WINDOW)),),
    ),
    Case(
        name="polls_cut",
        rule="a client whose check-ins break checks in again",
        tasks=_small(),
        faults=(Fault("CheckIn", Lose(is_served=False), last=3),),
    ),
    Case(
        name="proxy_pages",
        rule="a page of a proxy is no answer: the call is made again",
        tasks=_small(),
        faults=(
            Fault("GetChallenge", ProxyPage(502)),
            Fault("CheckIn", ProxyPage(504)),
            Fault("Report", ProxyPage(502)),
        ),
    ),
    Case(
        name="enrollment_lost",
        rule="a client whose enrollment was not answered repeats it with the same key",
        tasks=_small(),
        faults=(Fault("Enroll", Lose(is_served=True)),),
    ),
    Case(
        name="assignment_lost",
        rule="a client that did not get its assignment checks in again, and gets the same one",
        tasks=_small(),
        faults=(Fault("CheckIn", Lose(is_served=True)),),
    ),
    Case(
        name="receipt_lost",
        rule="a report that was not answered is repeated unchanged",
        tasks=_small(),
        faults=(Fault("Report", Lose(is_served=True)),),
    ),
    Case(
        name="killed_in_enrollment",
        rule="a client that is killed while it enrolls repeats the enrollment with the same key",
        tasks=_small(),
        faults=(Fault("Enroll", Kill(is_served=True)),),
    ),
    Case(
        name="killed_in_training",
        rule="a client that is killed while it trains is the same client after its start, and trains again",
        tasks=_small(config={"seconds": 2.0}, alter=_set(heartbeat_s=0.2)),
        faults=(Fault("Heartbeat", Kill(is_served=False)),),
        check=_enrolls_once,
    ),
    Case(
        name="killed_in_report",
        rule="a client that is killed after its report is accepted goes on with the next assignment",
        tasks=_small() * 2,
        faults=(Fault("Report", Kill(is_served=True)),),
        check=_enrolls_once,
    ),
)
_ENDS = (
    Case(
        name="stopped_by_the_server",
        rule="after a stop order a client ends its work without a report or a failure, and checks in in the window",
        tasks=_small(DROPPED, config={"seconds": 60.0}, alter=_set(heartbeat_s=0.5)),
        faults=(Fault("Heartbeat", EndAssignment(model_pb2.REASON_SURPLUS, _WINDOW), first=2, last=2),),
    ),
    Case(
        name="stopped_by_its_owner",
        rule="a client that is stopped (SIGTERM) fails its assignment with CLIENT_STOPPED",
        tasks=_small("CLIENT_STOPPED", config={"seconds": 60.0}, alter=_set(heartbeat_s=0.5)),
        stops=True,
    ),
    Case(
        name="deadline",
        rule="a client ends its work at the deadline, and checks in",
        tasks=_small(DROPPED, config={"seconds": 60.0}, alter=_shorten),
    ),
    Case(
        name="report_rejected",
        rule="a client whose report is rejected checks in within the retry window",
        tasks=_small(DROPPED),
        faults=(Fault("Report", EndAssignment(model_pb2.REASON_REJECTED_NORM, _WINDOW)),),
    ),
    Case(
        name="trainer_error",
        rule="a client whose trainer raises an error fails the assignment, and checks in",
        tasks=_small("TRAINER_ERROR", config={"fail": True}),
    ),
    Case(
        name="unknown_trainer",
        rule="an assignment for a trainer that the client does not have fails",
        tasks=_small("UNKNOWN_TRAINER", alter=_set(trainer="another")),
    ),
    Case(
        name="unknown_codec",
        rule="an assignment with a codec that the client does not have fails",
        tasks=_small("UNKNOWN_CODEC", alter=_set(uplink='{"codec":"no-such-codec"}')),
    ),
    Case(
        name="secure_aggregation_refused",
        rule="an assignment with a setup for secure aggregation that cannot be used fails",
        tasks=_small("UNSAFE_AGGREGATION", alter=_set(secure_setup=b"no setup")),
    ),
    Case(
        name="exchange_refused",
        rule="an assignment of a decentralised job fails unless the client's owner allows such jobs",
        tasks=_small("UNSAFE_AGGREGATION", alter=_set(gossip_setup=gossip_pb2.GossipSetup(trains=True))),
    ),
)
CASES = (*_TRAINING, *_DOWNLOADS, *_UPLOADS, *_ACCESS, *_BREAKS, *_ENDS)
