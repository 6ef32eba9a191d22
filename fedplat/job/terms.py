"""What follows from a job file for one client: what its assignments say, and in words what leaves it.

An owner of data who has approved a job file derives these from its text, and does not ask the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from fedplat import texts
from fedplat.config.plugins import has_absent, name_of
from fedplat.errors import SecureAggregationError
from fedplat.job import secure
from fedplat.job.privacy import calibrate
from fedplat.job.spec import JobSpec
from fedplat.procedures import Procedure
from fedplat.secure_aggregation.setup import AnySetup, ExactEncoding, ExactSetup, Setup


def max_rounds(spec: JobSpec) -> int:
    """Return the number of rounds that a client may take part in; a decentralised job has some without training."""
    return spec.rounds if spec.gossip is None else spec.rounds + spec.gossip.settle_rounds


def calibrate_noise(spec: JobSpec) -> JobSpec:
    """Return the job with the noise that its clients add themselves, if that follows from its epsilon.

    Takes about a second. Raises `JobFileError`, and `MissingExtraError` without the accountant.
    """
    privacy = spec.privacy
    if privacy is None or privacy.trust != "none" or privacy.noise_multiplier is not None:
        return spec
    return calibrate(spec)


def stated_epsilon(spec: JobSpec) -> float | None:
    """Return the epsilon that a job states; None if it states none."""
    return spec.privacy.epsilon if spec.privacy is not None else None


def derive_setup(
    spec: JobSpec, key: tuple[str, int, int], model_digest: str, content: bytes
) -> tuple[AnySetup | None, AnySetup | None]:
    """Return the setup of secure aggregation of an attempt (job, round and number), and the one in `content`; or None.

    What the job file does not say is as in `content`: the number of entries, and the bound of the replies to a
    procedure. A client compares both with the model or the message. Raises `SecureAggregationError`.
    """
    is_secure = spec.secure_aggregation is not None
    if spec.procedure is None:
        found = Setup.from_bytes(content) if content else None
        size = found.encoding.size if found is not None else 1
        return secure.build_setup(spec, *key, model_digest, size) if is_secure else None, found
    exact = ExactSetup.from_bytes(content) if content else None
    if not is_secure:
        return None, exact
    words = exact.encoding if exact is not None else ExactEncoding(length=1, bound=1, max_clients=1)
    try:
        words = structs.replace(words, max_clients=secure.group_maximum(spec))
    except ValueError as exc:
        raise SecureAggregationError(str(exc)) from exc
    return secure.build_exact_setup(spec, *key, model_digest, words), exact


class Exchange(NamedTuple):
    """How a silo takes part in a round of a decentralised job."""

    trains: bool
    exchange: str
    gamma: float | None


def derive_exchange(spec: JobSpec, round: int) -> Exchange | None:
    """Return how a client exchanges models in a round; None if it does not."""
    mode = spec.gossip
    return None if mode is None else Exchange(round <= spec.rounds, mode.exchange, mode.gamma)


class JobFact(NamedTuple):
    """A part of what a job means for the owner of data, under one title."""

    title: str
    texts: Sequence[str]


def describe(spec: JobSpec) -> list[JobFact]:
    """Return in words what leaves a client, who sees it, how often, under which guarantee, and what may go wrong."""
    asked = [] if spec.approval is None else [JobFact("purpose, as stated", [spec.approval.purpose or "none"])]
    asked += [] if spec.approval is None else [JobFact("contact", [spec.approval.contact or "none"])]
    work = _describe_training(spec) if spec.procedure is None else _describe_procedure(spec, spec.procedure)
    return [
        *asked,
        JobFact("what runs", [work.program]),
        JobFact("what leaves", work.contents),
        JobFact("how often", [_describe_rounds(spec)]),
        JobFact("who sees it", [_describe_receiver(spec, work.unit)]),
        JobFact("guarantee", [_describe_guarantee(spec)]),
        JobFact("what may go wrong", work.threats),
    ]


class _Work(NamedTuple):
    """What clients do for jobs of a kind, in words; `unit` is what they send at once."""

    program: str
    contents: Sequence[str]
    unit: str
    threats: Sequence[str]


def _describe_training(spec: JobSpec) -> _Work:
    program = f"the trainer {spec.trainer} of this client, with the settings of [config]"
    return _Work(program, [*_list_contents(spec), *_list_metrics(spec)], "update", [*_list_threats(spec)])


def _describe_procedure(spec: JobSpec, procedure: Procedure) -> _Work:
    program = f"the procedure {name_of(procedure)} of this client's own program, on its table {spec.trainer}"
    contents = ["what the procedure declares, which this client cannot show without its plugin"]
    if not has_absent(spec):
        contents = [*map(str, procedure.disclosures())]
    return _Work(program, contents, "reply", [*_list_threats_of_sums(spec)])


def _list_contents(spec: JobSpec) -> Iterator[str]:
    if spec.flower is not None:
        size = texts.size(spec.flower.max_reply_bytes(0))
        yield f"what the Flower app {spec.flower.app} on this client replies: any content, at least {size} a reply"
        return
    if spec.gossip is not None:
        yield "the whole model that this client has trained, or parts of sums with it"
    else:
        codec = spec.compression.uplink
        form = f", as the codec {name_of(codec)} rounds or shortens it" if codec is not None else ""
        yield f"an update of the model: all numbers of its size{form}"
    yield "the number of examples"


def _list_metrics(spec: JobSpec) -> Iterator[str]:
    yield "the metrics that the trainer returns, such as its loss"
    if (clients := spec.evaluation.clients) is not None:
        yield f"the metrics of the evaluator {clients.evaluator} on this client's data, plain, without noise"


def _describe_rounds(spec: JobSpec) -> str:
    text = f"in at most {texts.format_count(spec.rounds, 'round')}"
    if (most := max_rounds(spec)) > spec.rounds:
        text += f", and in {most - spec.rounds:,} more without training"
    if 0 < spec.max_participations < spec.rounds:
        text += f", of which one client takes part in {spec.max_participations:,}"
    return text


def _describe_receiver(spec: JobSpec, unit: str) -> str:
    if spec.gossip is not None:
        return "other clients of the job; the server sees sizes and digests"
    if spec.secure_aggregation is None:
        return f"the server, and with it its operator, each {unit} by itself"
    least = secure.group_minimum(spec)
    return f"the server, only as a sum over at least {least} clients, as long as it does not collude with most of them"


def _describe_guarantee(spec: JobSpec) -> str:
    privacy = spec.privacy
    if privacy is None:
        return "none: no noise is added"
    budget = f"epsilon {privacy.epsilon:g}" if privacy.epsilon is not None else "no bound on epsilon"
    noise = "this client and the others add the noise" if privacy.trust == "none" else "the server adds the noise"
    return f"differential privacy of a whole client, {budget} at delta {privacy.delta:g}; {noise}"


def _list_threats(spec: JobSpec) -> Iterator[str]:
    if spec.flower is not None:
        yield "the code of the app decides what it replies; nothing checks it here"
    if spec.gossip is not None:
        yield "a model can reveal records that it was trained on, to the clients that see it"
    elif spec.secure_aggregation is None:
        yield "single records can be reconstructed from an update, above all of few examples"
    elif not spec.secure_aggregation.confirm:
        yield "a server that tells clients different survivors can read an update: confirm would prevent it"
    if spec.privacy is None:
        yield "the model of all clients may remember single records, and those who have it can look for them"
    elif spec.privacy.trust == "server":
        yield "the guarantee is only that of an honest server, which sees the updates without noise"
    if spec.evaluation.clients is not None:
        yield "metrics of few examples describe these examples"
    yield "the server chooses the models after the first one; this client cannot check what they are made of"


def _list_threats_of_sums(spec: JobSpec) -> Iterator[str]:
    yield "sums over few rows describe these rows; two results over other rows may differ by what one person has"
    if spec.secure_aggregation is None:
        yield "minimum counts of rows hide numbers from the readers of the result, not from the server"
    elif not spec.secure_aggregation.confirm:
        yield "a server that tells clients different survivors can read a reply: confirm would prevent it"
    yield "a procedure of several steps: the server chooses the messages after the first one"
