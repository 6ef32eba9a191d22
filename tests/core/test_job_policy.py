"""A policy decides as a second evaluator does, and names each key that does not apply."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from fedplat.errors import JobFileError
from fedplat.job import JobSpec, parse_job
from fedplat.job.policy import AllowRule, Bounds, DenyRule, OwnerPolicy, decide, parse_policy

NOON = datetime.datetime(2026, 11, 28, 12, 0)
DIGEST, OTHER = "ab" * 32, "cd" * 32
HEAD = 'name = "j"\npopulation = "p"\ntrainer = "t"\nrounds = 30\n[model]\ninitial = "m:f"\n'
PLAIN = parse_job(HEAD + "[selection]\ngoal = 10\n[config]\nbatch = 32\nlabel = 'x'\n")
SECURE = parse_job(
    HEAD + "[selection]\ngoal = 10\nmin_fraction = 0.5\nclose = 'deadline'\n[secure_aggregation]\nconfirm = true\n"
    "[updates]\nweighting = 'uniform'\nclip_norm = 1.0\n"
    "[privacy]\ntrust = 'none'\nparticipation = 'fixed'\nepsilon = 2.0\ndelta = 1e-6\nmax_releases = 40\n"
)
NOISY = structs.replace(SECURE, privacy=structs.replace(SECURE.privacy, epsilon=None, noise_multiplier=1.0))  # type: ignore[type-var]
FLOWER = parse_job(HEAD + "[selection]\ngoal = 1\n[flower]\napp = 'a'\n")


def refuse(rule: dict[str, Any], spec: JobSpec, now: datetime.datetime = NOON) -> tuple[str, ...]:
    """Return why a rule for the trainer of all jobs does not apply."""
    given: dict[str, Any] = {"trainer": ("t",), **rule}
    policy = OwnerPolicy(allow=(AllowRule(**given),))
    decision = decide(policy, spec, DIGEST, now)
    assert decision.verdict == ("ask" if decision.findings[0].contrary else "allow")
    return decision.findings[0].contrary


@pytest.mark.parametrize(
    ("rule", "good", "bad", "reason"),
    [
        ({"digest": (DIGEST,)}, PLAIN, None, ""),
        ({"digest": (OTHER,)}, None, PLAIN, f"digest: the job has {DIGEST}"),
        ({"trainer": ("u", "t")}, PLAIN, None, ""),
        ({"trainer": ("u",)}, None, PLAIN, "trainer: the job has t"),
        ({"name": ("k",)}, None, PLAIN, "name: the job has j"),
        ({"population": ("q",)}, None, PLAIN, "population: the job has p"),
        ({"kind": ("sync",)}, SECURE, FLOWER, "kind: the job has flower"),
        ({"secure_aggregation": True}, SECURE, PLAIN, "secure_aggregation: the job has none"),
        ({"confirm": True}, SECURE, PLAIN, "confirm: the clients of the job do not confirm"),
        ({"local_noise": True}, SECURE, PLAIN, "local_noise: the clients of the job add none"),
        ({"min_clients": 5}, SECURE, PLAIN, "min_clients: the server learns sums of 1"),
        ({"min_clients": 6}, None, SECURE, "min_clients: the server learns sums of 5"),
        ({"max_rounds": 30}, PLAIN, None, ""),
        ({"max_rounds": 29}, None, PLAIN, "max_rounds: the job has 30"),
        ({"max_epsilon": 2.0, "max_delta": 1e-6}, SECURE, NOISY, "max_epsilon: the job states none"),
        ({"max_epsilon": 1.9, "max_delta": 1e-6}, None, SECURE, "max_epsilon: the job has 2"),
        ({"max_epsilon": 2.0, "max_delta": 1e-7}, None, SECURE, "max_delta: the job has 1e-06"),
        ({"max_epsilon": 2.0, "max_delta": 1e-6}, None, PLAIN, "max_epsilon: the job states none"),
        ({"config": {"batch": Bounds(min=16, max=32)}}, PLAIN, SECURE, "config.batch: the job has no such number"),
        ({"config": {"batch": Bounds(min=33)}}, None, PLAIN, "config.batch: the job has 32"),
        ({"config": {"batch": Bounds(max=31)}}, None, PLAIN, "config.batch: the job has 32"),
        ({"config": {"label": Bounds(max=31)}}, None, PLAIN, "config.label: the job has no such number"),
        ({"hours": "12:00-13:00"}, PLAIN, None, ""),
        ({"hours": "11:00-12:00"}, None, PLAIN, "hours: it is 12:00"),
        ({"until": "2026-11-28"}, PLAIN, None, ""),
        ({"until": "2026-11-27"}, None, PLAIN, "until: today is 2026-11-28"),
    ],
)
def test_each_key_applies_or_is_named(
    rule: dict[str, Any], good: JobSpec | None, bad: JobSpec | None, reason: str
) -> None:
    if good is not None:
        assert refuse(rule, good) == ()
    if bad is not None:
        assert refuse(rule, bad)[0].startswith(reason)


@pytest.mark.parametrize(("hour", "is_within"), [(19, False), (20, True), (23, True), (0, True), (5, True), (6, False)])
def test_hours_may_pass_midnight(hour: int, is_within: bool) -> None:
    assert (refuse({"hours": "20:00-06:00"}, PLAIN, NOON.replace(hour=hour)) == ()) == is_within


def test_deny_comes_first_and_then_the_first_rule_that_applies() -> None:
    text = (
        'unknown = "refuse"\n[[deny]]\npopulation = ["q"]\n[[deny]]\nkind = ["flower"]\n'
        '[[allow]]\ntrainer = ["u"]\n[[allow]]\ntrainer = ["t"]\nmax_rounds = 30\n[[allow]]\ntrainer = ["t"]\n'
    )
    policy = parse_policy(text)
    allowed = decide(policy, PLAIN, DIGEST, NOON)
    assert (allowed.verdict, allowed.rule) == ("allow", "allow 2")
    assert [each.rule for each in allowed.findings] == ["deny 1", "deny 2", "allow 1", "allow 2"]
    assert (denied := decide(policy, FLOWER, DIGEST, NOON)).verdict == "refuse"
    assert denied.rule == "deny 2"
    unknown = decide(policy, structs.replace(PLAIN, trainer="v"), DIGEST, NOON)
    assert (unknown.verdict, unknown.rule) == ("refuse", "unknown")
    assert decide(parse_policy(""), PLAIN, DIGEST, NOON).verdict == "ask"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[allow]]\nmax_rounds = 3\n", "neither digest nor trainer"),
        ("[[deny]]\n", "would apply to each job"),
        ('[[allow]]\ntrainer = ["t"]\nmax_epsilon = 1.0\n', "expected both"),
        ('[[allow]]\ntrainer = ["t"]\nuntil = "2026-02-30"\n', "expected a day, such as"),
        ('[[allow]]\ntrainer = ["t"]\nhours = "20-6"\n', r"hours = .*expected two times"),
        ('[[allow]]\ntrainer = ["t"]\nconfig = { batch = { min = 3, max = 2 } }\n', "expected min of at most max"),
        ('[[allow]]\ntrainer = ["t"]\nconfig = { batch = {} }\n', "both are missing"),
        ('[[allow]]\ntrainer = ["t"]\nmax_round = 3\n', "max_round"),
        ('[[deny]]\nmax_rounds = 3\nkind = ["sync"]\n', "max_rounds"),
        ('unknown = "allow"\n', "unknown"),
        ('[[allow]]\ndigest = ["abc"]\n', r"digest = .*64 hexadecimal digits"),
    ],
)
def test_mistakes_in_a_policy_are_refused(text: str, message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        parse_policy(text)


def evaluate(policy: OwnerPolicy, spec: JobSpec, now: datetime.datetime) -> str:
    """Decide as the text of the rules says, with another program: each condition is one comparison."""

    def is_named(rule: DenyRule) -> bool:
        kind = "flower" if spec.flower else type(spec.mode).__name__.lower()
        pairs = [(rule.digest, DIGEST), (rule.name, spec.name), (rule.trainer, spec.trainer), (rule.kind, kind)]
        return all(not names or value in names for names, value in pairs)

    def is_met(rule: AllowRule) -> bool:
        secure, privacy, batch = spec.secure_aggregation, spec.privacy, spec.config.get("batch", 0)
        epsilon = privacy.epsilon if privacy and privacy.epsilon else np.inf
        bounds = rule.config.get("batch")
        return bool(
            (secure or not rule.secure_aggregation)
            and ((secure and secure.confirm) or not rule.confirm)
            and ((privacy and privacy.trust == "none") or not rule.local_noise)
            and (5 if secure else 1) >= rule.min_clients
            and spec.rounds <= (rule.max_rounds or np.inf)
            and (rule.max_epsilon is None or (epsilon <= rule.max_epsilon and (rule.max_delta or 0) >= 1e-6))
            and (bounds is None or (batch and (bounds.min or 0) <= batch <= (bounds.max or np.inf)))  # type: ignore[operator]
            and (rule.until is None or f"{now:%Y-%m-%d}" <= rule.until)
            and (rule.hours is None or int(rule.hours[:2]) <= now.hour < int(rule.hours[6:8]))
        )

    if any(is_named(rule) for rule in policy.deny):
        return "refuse"
    return "allow" if any(is_named(rule) and is_met(rule) for rule in policy.allow) else policy.unknown


def draw_policy(rng: np.random.Generator) -> OwnerPolicy:
    def some(probability: float, value: Any, default: Any) -> Any:
        return value if rng.random() < probability else default

    def named() -> dict[str, Any]:
        return {
            "digest": some(0.1, (DIGEST,) if rng.random() < 0.5 else (OTHER,), ()),
            "name": some(0.2, ("j",) if rng.random() < 0.7 else ("k",), ()),
            "kind": some(0.3, ("sync",) if rng.random() < 0.7 else ("flower", "gossip"), ()),
            "trainer": ("t",) if rng.random() < 0.8 else ("u",),
        }

    def allow() -> AllowRule:
        epsilon = some(0.3, float(rng.choice([1.0, 2.0, 3.0])), None)
        return AllowRule(
            **named(),
            secure_aggregation=bool(rng.random() < 0.2),
            confirm=bool(rng.random() < 0.2),
            local_noise=bool(rng.random() < 0.2),
            min_clients=int(rng.integers(0, 7)) if rng.random() < 0.3 else 0,
            max_rounds=some(0.3, int(rng.integers(28, 33)), None),
            max_epsilon=epsilon,
            max_delta=None if epsilon is None else float(rng.choice([1e-7, 1e-6])),
            config=some(0.2, {"batch": Bounds(min=float(rng.integers(30, 35)))}, {}),
            hours=some(0.2, f"{rng.integers(8, 13):02}:00-{rng.integers(13, 15):02}:00", None),
            until=some(0.2, f"2026-11-{rng.integers(26, 31)}", None),
        )

    deny = tuple(DenyRule(**named()) for _ in range(rng.integers(0, 2)) if rng.random() < 0.3)
    unknown: Any = rng.choice(["ask", "refuse"])
    return OwnerPolicy(unknown=str(unknown), deny=deny, allow=tuple(allow() for _ in range(rng.integers(0, 4))))  # type: ignore[arg-type]


def test_1000_random_policies_decide_as_a_second_evaluator() -> None:
    rng, verdicts = np.random.default_rng(39), set[str]()
    jobs = (PLAIN, SECURE, NOISY, FLOWER)
    for number in range(1000):
        policy, spec = draw_policy(rng), jobs[number % len(jobs)]
        decision = decide(policy, spec, DIGEST, NOON)
        assert decision.verdict == evaluate(policy, spec, NOON), (policy, decision)
        verdicts.add(decision.verdict)
    assert verdicts == {"allow", "ask", "refuse"}
