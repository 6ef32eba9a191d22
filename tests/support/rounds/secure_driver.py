"""Drives a job with secure aggregation through its phases; the messages are valid in their form only."""

from __future__ import annotations

import hashlib
from typing import Any

from fedplat.job import JobSpec
from fedplat.rounds import AttemptKey, Proposal
from fedplat.rounds.events import (
    ClientCheckedIn,
    KeysAdvertised,
    MasksAnswered,
    SharesSent,
    SurvivorsConfirmed,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.protocols import secure_phases
from fedplat.rounds.states import AssignmentState, AttemptPhase
from fedplat.secure_aggregation.messages import KeyAdvertisement
from fedplat.secure_aggregation.setup import FEATURE
from support.rounds.driver import Driver, make_client, make_job, make_spec

FEATURES = frozenset({FEATURE})


def make_secure_spec(goal: int = 4, rounds: int = 2, **sections: Any) -> JobSpec:
    """A job file with secure aggregation; `options` are those of its table."""
    options = {"threshold": 0.6, "step_s": 20.0} | sections.pop("options", {})
    updates = {"clip_norm": 1.0, "weighting": "uniform"} | sections.pop("updates", {})
    return make_spec(goal, rounds, secure_aggregation=options, updates=updates, **sections)


def make_secure_client(client_id: str) -> ClientCheckedIn:
    """A client that has everything installed."""
    return make_client(client_id, features=FEATURES)


def make_keys(client_id: str, key: AttemptKey, salt: str = "") -> bytes:
    """The keys of a client in an attempt."""

    def draw(purpose: str) -> bytes:
        return hashlib.sha256(f"{purpose} {client_id} {key} {salt}".encode()).digest()

    return KeyAdvertisement(draw("encryption"), draw("masking"), draw("signature") * 2).to_bytes()


def keys_event(key: AttemptKey, client_id: str, salt: str = "") -> KeysAdvertised:
    """A client advertises its keys."""
    return KeysAdvertised(key, client_id, make_keys(client_id, key, salt))


def shares_event(key: AttemptKey, client_id: str, salt: str = "") -> SharesSent:
    """A client sends its shares."""
    return SharesSent(key, client_id, f"shares of {client_id} in {key} {salt}".encode())


def confirmation_event(key: AttemptKey, client_id: str, salt: str = "") -> SurvivorsConfirmed:
    """A client confirms the survivors."""
    return SurvivorsConfirmed(key, client_id, f"confirmation of {client_id} in {key} {salt}".encode())


def answer_event(key: AttemptKey, client_id: str, salt: str = "") -> MasksAnswered:
    """A client answers."""
    return MasksAnswered(key, client_id, f"answer of {client_id} in {key} {salt}".encode())


def report_event(key: AttemptKey, client_id: str) -> UpdateReported:
    """A client reports its masked update."""
    return UpdateReported(key, client_id, f"of-{client_id}", 1.0, update_bytes=8)


class SecureDriver(Driver):
    """A driver with the steps of clients of a secure aggregation, each in one batch."""

    def check_in(self, *client_ids: str) -> Proposal:
        """Clients that implement secure aggregation check in."""
        return self.do(*map(make_secure_client, client_ids))

    def advertise(self, *client_ids: str) -> Proposal:
        """Clients have trained."""
        return self.do(*(keys_event(self.key, name) for name in client_ids or self.names("TRAINING")))

    def share(self, *client_ids: str) -> Proposal:
        """Clients send shares."""
        return self.do(*(shares_event(self.key, name) for name in client_ids or self.names("ADVERTISED")))

    def upload_masked(self, *client_ids: str) -> Proposal:
        """Clients begin to upload."""
        return self.do(*(UploadStarted(self.key, name) for name in client_ids or self.names("SHARED")))

    def report_masked(self, *client_ids: str) -> Proposal:
        """Clients report."""
        return self.do(*(report_event(self.key, name) for name in client_ids or self.names("SHARED", "UPLOADING")))

    def confirm(self, *client_ids: str) -> Proposal:
        """Clients confirm."""
        return self.do(*(confirmation_event(self.key, name) for name in client_ids or self.names("REPORTED")))

    def answer(self, *client_ids: str) -> Proposal:
        """Clients answer."""
        return self.do(*(answer_event(self.key, name) for name in client_ids or self.names("REPORTED")))

    def names(self, *states: str) -> list[str]:
        """The clients in these states."""
        return [name for name, state in self.states().items() if state in states]

    def reach(self, phase: AttemptPhase) -> SecureDriver:
        """Let all clients take their steps until the attempt is in a phase."""
        steps = {
            AttemptPhase.ADVERTISING: self.advertise,
            AttemptPhase.SHARING: self.share,
            AttemptPhase.COLLECTING: self.report_masked,
            AttemptPhase.CONFIRMING: self.confirm,
            AttemptPhase.UNMASKING: self.answer,
        }
        while self.attempt.phase is not phase:
            steps[self.attempt.phase]()
        return self

    def groups(self) -> list[list[str]]:
        """The members of each group."""
        return [[each.client_id for each in members] for members in secure_phases.list_groups(self.attempt)]

    def survivors(self) -> list[tuple[list[str], list[str]]]:
        """The survivors of each group, and those that dropped out."""
        found: list[tuple[list[str], list[str]]] = []
        for members in secure_phases.list_groups(self.attempt):
            sets = secure_phases.find_survivors(members)
            found.append(
                (
                    sorted(members[place].client_id for place in sets.survivors),
                    sorted(members[place].client_id for place in sets.dropped),
                )
            )
        return found


def advertising(num_clients: int = 4, goal: int = 4, **sections: Any) -> SecureDriver:
    """A job whose first attempt has `num_clients` clients in training."""
    driver = SecureDriver(make_job(spec=make_secure_spec(goal, **sections)))
    driver.start(num_clients)
    assert driver.attempt.phase is AttemptPhase.ADVERTISING
    assert driver.counts() == {str(AssignmentState.TRAINING): num_clients}
    return driver
