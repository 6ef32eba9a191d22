from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedplat import aggregate, model, sampling
from fedplat.config import toml
from fedplat.errors import JobFileError
from fedplat.job import Adaptive, ClientEvaluation, JobSpec, Selection, build_rule, parse_job
from support.jobs import SMALL
from support.rules import NEEDED

FULL = """\
name = "digits-1.b_2"
population = "demo"
trainer = "digits"
rounds = 20

[model]
initial = "models/initial.safetensors"

[selection]
goal = 8
over_selection = 1.25
min_fraction = 0.5
sampling = { policy = "uniform" }
where = "region == 'eu' and memory_mb >= 4096"
wait_for = 9
min_separation = 3
close = "deadline"

[config]
epochs = 2
lr = 0.1
optimizer = "sgd"
shuffle = true

[deadlines]
selection_s = 5
training_s = 20.5
upload_s = 3
heartbeat_s = 0.5

[deadlines.adaptive]
percentile = 80
margin = 2
min_s = 0.5
after = 5

[retry]
base_s = 0.1
max_s = 2
max_attempts = 7

[updates]
weighting = "uniform"
max_examples = 500
clip_norm = 10.0

[aggregation]
rule = "fedadam"
learning_rate = 0.02

[evaluation]
every = 2
server = "digits"

[evaluation.clients]
evaluator = "digits"
goal = 4
min_fraction = 0.25
timeout_s = 5
"""


def test_a_file_with_every_section():
    spec = parse_job(FULL)
    assert (spec.name, spec.population, spec.trainer, spec.rounds) == ("digits-1.b_2", "demo", "digits", 20)
    assert spec.model.initial == "models/initial.safetensors"
    assert spec.selection == Selection(
        8, 1.25, 0.5, sampling.Uniform(), "region == 'eu' and memory_mb >= 4096", 9, 3, "deadline"
    )
    assert (spec.selection.target, spec.selection.minimum) == (10, 4)
    assert spec.config == {"epochs": 2, "lr": 0.1, "optimizer": "sgd", "shuffle": True}
    assert [type(value) for value in spec.config.values()] == [int, float, str, bool]
    assert spec.deadlines.adaptive == Adaptive(percentile=80, margin=2, min_s=0.5, after=5)
    assert (spec.deadlines.selection_s, spec.deadlines.training_s, spec.deadlines.upload_s) == (5, 20.5, 3)
    assert spec.retry.max_attempts == 7
    assert spec.aggregation == aggregate.FedAdam(learning_rate=0.02)
    assert spec.evaluation.every == 2
    assert spec.evaluation.server == "digits"
    assert spec.evaluation.clients == ClientEvaluation("digits", 4, 0.25, 5)


def test_a_small_file_has_the_defaults_that_are_documented():
    spec = parse_job(SMALL)
    assert (spec.selection.target, spec.selection.minimum) == (6, 4)  # ceil(1.3 * 4), ceil(0.8 * 4)
    assert spec.aggregation == aggregate.FedAvg()
    assert spec.config == {}
    assert spec.deadlines.adaptive is None
    assert spec.evaluation.server is None
    assert spec.weight(1e9) == 1_000_000.0


@pytest.mark.parametrize(("goal", "factor", "target"), [(10, 1.1, 11), (10, 1.3, 13), (3, 1.3, 4), (1, 1.0, 1)])
def test_over_selection_is_not_fooled_by_rounding(goal: int, factor: float, target: int):
    assert Selection(goal=goal, over_selection=factor).target == target


def test_the_minimum_is_at_least_one_report():
    assert Selection(goal=1, min_fraction=0.001).minimum == 1
    assert Selection(goal=10, min_fraction=0.7).minimum == 7


def test_weights():
    assert [parse_job(SMALL).weight(n) for n in (0.5, 7, 2e6)] == [0.5, 7, 1e6]
    assert parse_job(FULL).weight(12345) == 1.0


@pytest.mark.parametrize("rule", aggregate.RULES)
def test_each_rule_has_a_name_in_job_files(rule: str):
    keys = "\n".join(f"{key} = {value}" for key, value in NEEDED.get(rule, {}).items())
    more = f'[config]\nalgorithm = "{rule}"\n[updates]\nweighting = "uniform"\n[aggregation]\nrule = "{rule}"\n{keys}'
    assert type(parse_job(SMALL + more).aggregation) is aggregate.RULES[rule]


def with_line(line: str, section: str = "") -> str:
    """The small file with one more line, at the top or in a section, in place of the line with the same key."""
    key = line.partition("=")[0].strip()
    lines = [known for known in SMALL.splitlines() if known.partition("=")[0].strip() != key]
    place = lines.index(f"[{section}]") + 1 if section else 0
    return "\n".join([*lines[:place], line, *lines[place:]])


def without(key: str) -> str:
    return "\n".join(line for line in SMALL.splitlines() if line.partition("=")[0].strip() != key)


RULES = ", ".join([*aggregate.RULES, "flower"])
MISTAKES: Mapping[str, tuple[str, str]] = {
    "typo in a top-level key": (
        SMALL.replace("rounds = 3", "round = 3\nrounds = 3"),
        "round = 3: there is no such key; did you mean rounds?",
    ),
    "typo in a nested key": (
        with_line("min_fractoin = 0.5", "selection"),
        "selection.min_fractoin = 0.5: there is no such key; did you mean min_fraction or min_separation?",
    ),
    "typo two levels down": (
        f"{SMALL}[evaluation.clients]\nevaluator = 'e'\ngoal = 1\ntimeout = 3\n",
        "evaluation.clients.timeout = 3: there is no such key; did you mean timeout_s?",
    ),
    "typo in a table's name": (
        f"{SMALL}[deadline]\ntraining_s = 3\n",
        "deadline = {…}: there is no such key; did you mean deadlines?",
    ),
    "unknown key far from all others": (
        with_line("zzz = 1", "model"),
        "model.zzz = 1: there is no such key; known keys: initial",
    ),
    "unknown key that needs quotes": (
        with_line('"a\\nb" = 1', "model"),
        "model.'a\\nb' = 1: there is no such key; known keys: initial",
    ),
    "typo in a rule": (
        f"{SMALL}[aggregation]\nrule = 'fedadm'\n",
        f"aggregation.rule = 'fedadm': expected one of {RULES}; did you mean fedadam or fedavgm?",
    ),
    "a rule that is a number": (
        f"{SMALL}[aggregation]\nrule = 3\n",
        f"aggregation.rule = 3: expected one of {RULES}",
    ),
    "no rule": (
        f"{SMALL}[aggregation]\nlearning_rate = 1.0\n",
        f"aggregation.rule: this key is required and missing; expected one of {RULES}",
    ),
    "typo in an option of a rule": (
        f"{SMALL}[aggregation]\nrule = 'fedadam'\nbeta_1 = 0.9\n",
        "aggregation.beta_1 = 0.9: there is no such key; did you mean beta1 or beta2?",
    ),
    "an option of another rule": (
        f"{SMALL}[aggregation]\nrule = 'fedavg'\nmomentum = 0.9\n",
        "aggregation.momentum = 0.9: there is no such key; known keys: learning_rate",
    ),
    "an option out of range": (
        f"{SMALL}[aggregation]\nrule = 'fedadam'\nbeta1 = 1.0\n",
        "aggregation.beta1 = 1.0: expected a number < 1.0",
    ),
    "wrong type": (with_line("rounds = 'three'"), "rounds = 'three': expected a whole number"),
    "true for a number": (with_line("rounds = true"), "rounds = true: expected a whole number"),
    "a goal with a point": (with_line("goal = 8.0", "selection"), "selection.goal = 8.0: expected a whole number"),
    "negative number": (with_line("goal = -4", "selection"), "selection.goal = -4: expected a whole number >= 1"),
    "too large": (with_line("rounds = 1000001"), "rounds = 1000001: expected a whole number <= 1000000"),
    "zero seconds": (
        f"{SMALL}[deadlines]\ntraining_s = 0\n",
        "deadlines.training_s = 0: expected a number >= 0.01",
    ),
    "endless seconds": (
        f"{SMALL}[deadlines]\ntraining_s = inf\n",
        "deadlines.training_s = inf: expected a number <= 31536000.0",
    ),
    "no number of seconds": (f"{SMALL}[retry]\nmax_s = nan\n", "retry.max_s = nan: expected a number >= 0.01"),
    "an endless bound": (f"{SMALL}[updates]\nclip_norm = inf\n", "updates.clip_norm = inf: expected a number <= 1e+30"),
    "missing key": (without("population"), "population: this key is required and missing"),
    "missing nested key": (without("goal"), "selection.goal: this key is required and missing"),
    "number for a name": (with_line("name = 3"), "name = 3: expected text"),
    "a name with a space": (
        with_line("name = 'a b'"),
        "name = 'a b': expected a name: at most 63 letters, digits, '_', '.' and '-', and a letter or a digit first",
    ),
    "text for a table": (f"retry = 'often'\n{SMALL}", "retry = 'often': expected a table, [retry]"),
    "a list for a table": (f"config = [1]\n{SMALL}", "config = […]: expected a table, [config]"),
    "a table for a number": (
        without("rounds").replace("[model]", "rounds = {a = 1}\n[model]"),
        "rounds = {…}: expected a whole number",
    ),
    "wrong choice": (
        with_line("close = 'never'", "selection"),
        "selection.close = 'never': expected one of goal, deadline",
    ),
    "typo in a choice": (
        f"{SMALL}[updates]\nweighting = 'example'\n",
        "updates.weighting = 'example': expected one of examples, uniform; did you mean examples?",
    ),
    "an expression that is no Python": (
        with_line("where = 'region ='", "selection"),
        "selection.where = 'region =': 'region =' is not an expression over labels (invalid syntax (<unknown>, line 1)"
        "); expected, for instance: region == 'eu' and memory_mb >= 4096",
    ),
    "an expression that calls": (
        with_line("where = 'f(1) == 1'", "selection"),
        "selection.where = 'f(1) == 1': 'f(1)' is not a label, text or number",
    ),
    "an initial model of another kind": (
        with_line("initial = 'model.pt'", "model"),
        "model.initial = 'model.pt': expected a path that ends in .safetensors, or module:function",
    ),
    "NaN in the config": (f"{SMALL}[config]\nlr = nan\n", "config.lr = nan: expected a finite number"),
    "a number beyond 64 bits": (
        f"{SMALL}[config]\nseed = 9223372036854775808\n",
        "config.seed = 9223372036854775808: expected a number of at most 64 bits",
    ),
    "a number beyond all bounds": (
        f"{SMALL}[config]\nseed = 0x{'f' * 5000}\n",
        "config.seed = (a number of 20000 bits): expected a number of at most 64 bits",
    ),
    "seconds beyond all bounds": (
        f"{SMALL}[retry]\nbase_s = 0x{'f' * 5000}\n",
        "retry.base_s = (a number of 20000 bits): expected a number of at most 64 bits",
    ),
    "a list in the config": (
        f"{SMALL}[config]\nlayers = [1, 2]\n",
        "config.layers = […]: expected true or false or a number or text",
    ),
    "a date in the config": (
        f"{SMALL}[config]\nsince = 2026-07-23\n",
        "config.since = 2026-07-23: expected true or false or a number or text",
    ),
    "bounds that exclude each other": (
        f"{SMALL}[deadlines]\ntraining_s = 5.0\n[deadlines.adaptive]\nmin_s = 6.0\n",
        "deadlines.adaptive.min_s = 6.0: expected at most training_s, which is 5.0",
    ),
    "too many hyper-parameters": (
        f"{SMALL}[config]\n" + "\n".join(f"k{i} = 1" for i in range(1001)),
        "config has 1001 keys; expected at most 1000",
    ),
    "a long value": (
        with_line(f"initial = '{'x' * 1000}'", "model"),
        f"model.initial = '{'x' * 56}...: expected a path that ends in .safetensors, or module:function",
    ),
    "no TOML": ("a = [\n", "the job file is not valid TOML: Invalid value (at end of document)"),
    "the same key twice": (
        f"name = 'b'\n{SMALL}",
        "the job file is not valid TOML: Cannot overwrite a value (at line 2, column 11)",
    ),
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_named_with_its_key_its_value_and_what_was_expected(text: str, message: str):
    with pytest.raises(JobFileError) as caught:
        parse_job(text)
    assert str(caught.value) == message


def test_every_mistake_has_its_line():
    text = SMALL.replace("rounds = 3", "rounds = 'x'\nnaem = 3").replace("goal = 4", "goal = 0\nwher = ''")
    with pytest.raises(JobFileError) as caught:
        parse_job(f"{text}[config]\nlr = [1]\n")
    assert str(caught.value).splitlines() == [
        "naem = 3: there is no such key; did you mean name?",
        "rounds = 'x': expected a whole number",
        "selection.wher = '': there is no such key; did you mean where?",
        "selection.goal = 0: expected a whole number >= 1",
        "config.lr = […]: expected true or false or a number or text",
    ]


def test_a_file_of_nothing_but_mistakes_has_a_bounded_message():
    with pytest.raises(JobFileError) as caught:
        parse_job("\n".join(f"key{i} = '{'x' * 1000}'" for i in range(5000)))
    assert len(str(caught.value).splitlines()) == toml.MAX_MISTAKES
    assert len(str(caught.value)) < 7000  # a gRPC status has room for about 8 KiB


def test_any_label_may_appear_in_where():
    assert parse_job(with_line("where = 'no_such_label > 3'", "selection")).selection.where == "no_such_label > 3"


def outcome_of(text: str) -> JobSpec | list[str]:
    """The job, or the lines of the error."""
    try:
        return parse_job(text)
    except JobFileError as exc:
        return str(exc).splitlines()


UNTIMED = settings(deadline=None)


@UNTIMED
@given(st.text())
@example("a=" + "1" * 5000)
@example("a=" + "[" * 5000)
@example("a" + ".a" * 500 + "=1")
@example("'\ud800'=1")
def test_any_text_is_a_job_or_an_error(text: str):
    assert outcome_of(text)


KEYS = st.sampled_from(
    [
        *("name", "population", "trainer", "rounds", "model", "selection", "config", "deadlines", "retry", "updates"),
        *("aggregation", "evaluation", "clients", "adaptive", "goal", "initial", "rule", "where", "training_s", "x"),
    ]
)
SCALARS = st.one_of(
    st.booleans().map(lambda value: str(value).lower()),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
    st.sampled_from(["'fedavg'", "'m:f'", "'a.safetensors'", "2026-07-23", "07:32:00", "2026-07-23T07:32:00Z", "'eu'"]),
    st.text("abcxyz=()'<> 1\\n", max_size=8).map(lambda text: '"' + text.replace("\\", "\\\\") + '"'),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(KEYS, inner, max_size=4).map(
            lambda table: "{" + ", ".join(f"{key} = {value}" for key, value in table.items()) + "}"
        ),
    ),
    max_leaves=8,
)


@UNTIMED
@given(st.dictionaries(KEYS, VALUES, max_size=8))
def test_any_toml_is_a_job_or_an_error(table: dict[str, str]):
    text = "\n".join(f"{key} = {value}" for key, value in table.items())
    tomllib.loads(text)  # it is TOML
    assert outcome_of(text)


@UNTIMED
@given(st.sampled_from(sorted({line.partition(" =")[0] for line in FULL.splitlines() if " = " in line})), SCALARS)
def test_a_good_file_with_one_value_changed_is_a_job_or_an_error_about_it(key: str, value: str):
    lines = [f"{key} = {value}" if line.startswith(f"{key} = ") else line for line in FULL.splitlines()]
    outcome = outcome_of("\n".join(lines))
    if isinstance(outcome, JobSpec):
        check_usable(outcome)
    else:
        assert all(key in line or "training_s" in line for line in outcome)


def check_usable(spec: JobSpec) -> None:
    """What the server does with every job that it accepts."""
    assert 1 <= spec.selection.minimum <= spec.selection.goal <= spec.selection.target
    values: list[Any] = [spec.weight(1.0), *spec.config.values()]
    assert all(np.isfinite(value) for value in values if not isinstance(value, str))
    rule = build_rule(spec)
    contribution = aggregate.Contribution(1.0, metrics=dict.fromkeys(rule.metrics, 1.0))
    partial = rule.fold(rule.start(2), model.VectorBlocks(np.ones(2, "f4")), contribution)
    assert np.isfinite(rule.apply(rule.init(2), partial)[0]).all()
