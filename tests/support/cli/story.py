"""The history of a job, as a scripted server sends it."""

from __future__ import annotations

from fedplat.wire.v1 import admin_pb2


def script() -> list[admin_pb2.JobEvent]:
    """Two rounds of a job: one abandoned attempt, one late and one failed client, and an evaluation."""
    event = admin_pb2.JobEvent

    def assignment(
        place: tuple[int, int], client: str, before: str, after: str, update_bytes: int = 0
    ) -> admin_pb2.JobEvent:
        return event(
            entity="assignment",
            round=place[0],
            attempt=place[1],
            client_id=client,
            from_state=before,
            to_state=after,
            update_bytes=update_bytes,
        )

    def attempt(place: tuple[int, int], before: str, after: str, reason: str = "", **metrics: float):
        return event(
            entity="attempt",
            round=place[0],
            attempt=place[1],
            from_state=before,
            to_state=after,
            reason=reason,
            metrics=metrics,
            kind=admin_pb2.ATTEMPT_KIND_EVALUATE if place == c else admin_pb2.ATTEMPT_KIND_TRAIN,
        )

    a, b, c, d = (1, 1), (1, 2), (1, 3), (2, 1)
    return [
        event(entity="job", from_state="DRAFT", to_state="RUNNING"),
        attempt(a, "", "SELECTING"),
        attempt(a, "SELECTING", "ABANDONED", "3 of 8 clients came"),
        attempt(b, "", "SELECTING"),
        *(assignment(b, f"client-{i}", "", "TRAINING") for i in range(4)),
        attempt(b, "SELECTING", "COLLECTING"),
        assignment(b, "client-0", "TRAINING", "UPLOADING"),
        assignment(b, "client-0", "UPLOADING", "REPORTED", 1500),
        assignment(b, "client-1", "TRAINING", "REPORTED", 548),
        assignment(b, "client-2", "TRAINING", "FAILED"),
        assignment(b, "client-3", "TRAINING", "LATE"),
        attempt(b, "COLLECTING", "COMMITTING"),
        assignment(b, "client-0", "REPORTED", "MERGED", 1500),
        assignment(b, "client-1", "REPORTED", "MERGED", 548),
        attempt(b, "COMMITTING", "COMMITTED", loss=0.5),
        event(entity="version", round=1, attempt=2, from_state="0", to_state="1"),
        event(entity="version", round=1, attempt=2, from_state="1", to_state="1", metrics={"accuracy": 0.75}),
        attempt(c, "", "SELECTING"),
        assignment(c, "client-0", "", "TRAINING"),
        attempt(c, "SELECTING", "COLLECTING"),
        assignment(c, "client-0", "TRAINING", "REPORTED"),
        attempt(c, "COLLECTING", "COMMITTING"),
        attempt(c, "COMMITTING", "COMMITTED", accuracy=0.7),
        attempt(d, "", "SELECTING"),
        assignment(d, "client-1", "", "TRAINING"),
        attempt(d, "SELECTING", "COLLECTING"),
    ]


def ending(status: str = "COMPLETED", reason: str = "") -> admin_pb2.JobEvent:
    """The last event of a job."""
    return admin_pb2.JobEvent(entity="job", from_state="RUNNING", to_state=status, reason=reason)
