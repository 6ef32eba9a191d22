"""The policy of an owner in words."""

from __future__ import annotations

from fedplat.job.policy import AllowRule, OwnerPolicy, parse_policy
from fedplat.job.policy_texts import describe_rule, describe_unknown

DIGEST = "ab" * 32
EACH_KEY = {
    "digest": (f"digest = ['{DIGEST}']", f"its digest is {DIGEST}"),
    "name": ("name = ['a', 'b', 'c']", "its name is a, b or c"),
    "population": ("population = ['demo', 'other']", "its population is demo or other"),
    "trainer": ("", "its trainer is digits"),
    "kind": ("kind = ['sync', 'gossip']", "its kind is sync or gossip"),
    "secure_aggregation": ("secure_aggregation = true", "it has secure aggregation"),
    "confirm": ("confirm = true", "its clients confirm the survivors of a secure aggregation to each other"),
    "local_noise": ("local_noise = true", "its clients add the noise themselves"),
    "min_clients": ("min_clients = 1000", "the server learns only sums over at least 1,000 clients"),
    "max_rounds": ("max_rounds = 40", "it has at most 40 rounds"),
    "max_epsilon": ("max_epsilon = 1.5\nmax_delta = 1e-6", "it states an epsilon of at most 1.5"),
    "max_delta": ("max_epsilon = 1.5\nmax_delta = 1e-6", "it states a delta of at most 1e-06"),
    "config": (
        "config.batch_size = { min = 16, max = 64 }",
        "[config] has a number batch_size of at least 16 and at most 64",
    ),
    "hours": ("hours = '20:00-06:00'", "it is between 20:00 and 06:00 by this machine's clock"),
    "until": ("until = '2027-03-01'", "today is not after 2027-03-01"),
}


def test_each_key_of_a_rule_has_words() -> None:
    assert EACH_KEY.keys() == set(AllowRule.__struct_fields__)
    for key, (text, expected) in EACH_KEY.items():
        (rule,) = parse_policy(f"[[allow]]\ntrainer = ['digits']\n{text}\n").allow
        conditions = describe_rule(rule)
        assert expected in conditions
        assert len(conditions) == len({"trainer", key}) + (key in ("max_epsilon", "max_delta"))


def test_a_rule_that_denies_and_the_end_of_a_policy_have_words() -> None:
    (rule,) = parse_policy("[[deny]]\nname = ['experiment']\n").deny
    assert describe_rule(rule) == ["its name is experiment"]
    texts = {describe_unknown(OwnerPolicy(unknown=verdict)) for verdict in ("ask", "refuse")}
    assert len(texts) == 2
