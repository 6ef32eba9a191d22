"""A client's data directory with offered jobs and a record, for what its owner sees: no server is needed."""

from __future__ import annotations

import datetime
from pathlib import Path

from fedplat.job import canonical_text, digest_job, parse_job
from fedplat_client import Client
from fedplat_client._state.approvals import Decision, OfferedFile
from fedplat_client._state.released import PLAIN, Protection, ReleasedLine, ReleaseRecord

INITIAL = "ab" * 32
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>| \x1b[2J\u202e"
"""A name, a reason or a purpose that is more than text to a page, a terminal or Markdown."""
HEAD = "name = '{name}'\npopulation = 'hospital'\ntrainer = 'digits'\nrounds = {rounds}\nmodel.initial = 'm:f'\n"
PLAIN_JOB = HEAD + "[selection]\ngoal = 1\n[config]\nepochs = {epochs}\nnote = '''{note}'''\n"
MASKED_JOB = HEAD + (
    "[selection]\ngoal = 4\nmin_fraction = 0.75\nclose = 'deadline'\n[secure_aggregation]\nconfirm = true\n"
    "[updates]\nweighting = 'uniform'\nclip_norm = 1.0\n[privacy]\ntrust = 'none'\nparticipation = 'fixed'\n"
    "noise_multiplier = 1.0\ndelta = 1e-6\nmax_releases = 9\n"
)
POLICY = """
[[deny]]
name = ["experiment"]

[[allow]]
trainer = ["digits"]
secure_aggregation = true
min_clients = 3
max_rounds = 100

[[allow]]
trainer = ["never"]
config.batch_size = { min = 16 }
hours = "20:00-06:00"
until = "2027-03-01"
"""


def open_owner(folder: Path) -> Client:
    """A client that has not enrolled; its owner can already decide."""
    return Client("127.0.0.1:7443", population="hospital", data_dir=folder)


def offer(client: Client, text: str, submitter: str = "anna", job_id: str = "j-1") -> str:
    """Store a job as if the server had offered it, and return its digest."""
    spec = parse_job(text)
    digest = digest_job(spec, INITIAL)
    client.open_owner_files().offers.add(
        digest, OfferedFile(canonical_text(spec), INITIAL, job_id=job_id, submitter=submitter)
    )
    return digest


def plain_job(name: str = "digits", rounds: int = 3, epochs: int = 2, note: str = "x", purpose: str = "") -> str:
    text = PLAIN_JOB.format(name=name, rounds=rounds, epochs=epochs, note=note)
    return f"{text}[approval]\npurpose = '''{purpose}'''\ncontact = 'pi@example.org'\n" if purpose else text


def masked_job(name: str = "masked", rounds: int = 3) -> str:
    return MASKED_JOB.format(name=name, rounds=rounds)


def line(number: int, job: str = "digits", digest: str = "", **fields: object) -> ReleasedLine:
    """The line of an update: 20 a day from the first of October 2026 on."""
    time = datetime.datetime(2026, 10, 1, tzinfo=datetime.UTC) + datetime.timedelta(minutes=72 * number)
    values: dict[str, object] = {
        "content": "update",
        "time": time.isoformat(timespec="milliseconds"),
        "job_id": f"j-{job[:20]}",
        "job": job,
        "round": number + 1,
        "attempt": 1,
        "trainer": "digits",
        "size_bytes": 1000,
        "digest": f"{number:064x}",
        "protection": PLAIN,
        "job_digest": digest,
    }
    return ReleasedLine(**{**values, **fields})  # type: ignore[arg-type]


MASKED = Protection(masked=True, min_clients=3, noise_multiplier=1.0)


def fill(folder: Path) -> tuple[Client, dict[str, str]]:
    """A site with a job that waits, one of the policy, an approved and a rejected one; digests by their names."""
    client = open_owner(folder)
    note = HOSTILE.replace("\x1b", "").replace("\u202e", "").replace("'", "")
    digests = {
        "approved": offer(client, plain_job("approved", purpose="a study | <b>IRB</b>"), job_id="j-approved"),
        "masked": offer(client, masked_job(), job_id="j-masked"),
        "experiment": offer(client, plain_job("experiment")),
        "rejected": offer(client, plain_job("rejected", epochs=7)),
        "waiting": offer(client, plain_job("waiting", rounds=40, epochs=9, note=note, purpose=note), submitter=HOSTILE),
    }
    files = client.open_owner_files()
    files.policy.path.write_text(POLICY)
    client.decide(digests["approved"], Decision("approved", at="2026-11-01T09:00:00+00:00", max_rounds=3))
    client.decide(digests["rejected"], Decision("rejected", at="2026-11-02T09:00:00+00:00", reason="no <b>purpose</b>"))
    record = ReleaseRecord(client.released)
    for number in range(3):
        record.add(line(number, "approved", digests["approved"]))
    for number in range(600, 603):
        record.add(line(number, "masked", digests["masked"], protection=MASKED))
    record.add(line(610, "approved", digests["approved"], content="metrics", size_bytes=0, metrics={"loss": 0.5}))
    record.add(line(700, HOSTILE, receiver="c-<b>other</b>", content="model"))
    return client, digests
