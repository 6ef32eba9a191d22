"""The digest of a job changes with every key of its file, and with nothing else that people may write differently."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping

import pytest
from msgspec import Struct, structs

from fedplat.config.toml import to_table
from fedplat.errors import JobFileError
from fedplat.job import JobSpec, Selection, digest_job, parse_job

MODEL, OTHER = "ab" * 32, "cd" * 32
HEAD = 'name = "j"\npopulation = "p"\ntrainer = "t"\nrounds = 3\n'
FILE = HEAD + (
    '[model]\ninitial = "m:f"\n[selection]\ngoal = 10\n[config]\nepochs = 2\nrate = 0.5\n[updates]\nmax_norm = 5.0\n'
)
SAME = {
    "comments": "# a study\n" + FILE,
    "order": 'rounds = 3\ntrainer = "t"\npopulation = "p"\nname = "j"\n'
    '[updates]\nmax_norm = 5.0\n[config]\nrate = 0.5\nepochs = 2\n[selection]\ngoal = 10\n[model]\ninitial = "m:f"\n',
    "numbers": FILE.replace("5.0", "5").replace("rate = 0.5", "rate = 5e-1"),
    "defaults": FILE + 'weighting = "examples"\n[mode]\nkind = "sync"\n[deadlines]\n',
    "inline": HEAD + 'model = { initial = "m:f" }\nselection = { goal = 10 }\nupdates.max_norm = 5.0\n'
    "config = { epochs = 2, rate = 0.5 }\n",
}
TABLES = (
    "[privacy]\nparticipation = 'fixed'\ndelta = 1e-6\nnoise_multiplier = 1.0\ntrust = 'none'\nmax_releases = 9\n"
    "[privacy.metrics]\nnoise_multiplier = 2.0\nbounds = { loss = [0.0, 5.0] }\n"
    "[secure_aggregation]\nconfirm = true\n[updates]\nweighting = 'uniform'\nclip_norm = 1.0\n"
    "[retention]\nversions = 5\n[approval]\npurpose = 'p'\n",
    "[mode]\nkind = 'buffered'\nconcurrency = 20\n[mode.staleness]\nkind = 'hinge'\n",
    "[mode]\nkind = 'ssp'\nconcurrency = 8\nslack = 2\n",
    "[mode]\nkind = 'cyclic'\nclients = 3\n",
    "[mode]\nkind = 'gossip'\n[updates]\nweighting = 'uniform'\n",
    "[flower]\napp = 'a'\n",
    "[robust]\nbyzantine = 1\nrule = { name = 'median' }\n[pool]\nranks = 2\n",
    "[aggregation]\nrule = 'fedadam'\n[compression]\nuplink = { codec = 'quantize', bits = 8 }\n"
    "downlink = { codec = 'bf16' }\n[evaluation]\nevery = 2\nserver = 'e'\n"
    "[evaluation.clients]\nevaluator = 'e'\ngoal = 2\n",
    "[warm_start]\ntrainer = 't'\nbatch_size = 8\nlearning_rate = 0.1\n"
    "[retry]\n[deadlines]\nadaptive = { after = 2 }\n",
    "[server_step]\ntrainer = 't'\nbatch_size = 8\nlearning_rate = 0.1\nsteps = 2\n",
)


@functools.cache
def read(tables: str) -> JobSpec:
    selection = "goal = 1" if "ssp" in tables or "cyclic" in tables else "goal = 10"
    more = "\nclose = 'deadline'" if "privacy" in tables else ""
    return parse_job(f'{HEAD}[model]\ninitial = "m:f"\n[selection]\n{selection}{more}\n{tables}')


@pytest.mark.parametrize("name", SAME)
def test_what_means_the_same_has_the_same_digest(name: str) -> None:
    assert digest_job(parse_job(SAME[name]), MODEL) == digest_job(parse_job(FILE), MODEL)


def test_the_digest_is_that_of_this_version() -> None:
    """If this fails, owners compare digests of other jobs: give `digest_job` another name for its hash."""
    assert digest_job(parse_job(FILE), MODEL)[:16] == "4cdbd9dafd590333"


def test_jobs_from_objects_have_the_digest_of_their_file() -> None:
    spec = structs.replace(parse_job(FILE), selection=Selection(goal=10, over_selection=1))
    again = parse_job(FILE.replace("goal = 10", "goal = 10\nover_selection = 1.0"))
    assert digest_job(spec, MODEL) == digest_job(again, MODEL)
    with pytest.raises(JobFileError, match="goal"):
        digest_job(structs.replace(parse_job(FILE), selection=structs.replace(spec.selection, goal=0)), MODEL)


def test_another_model_or_another_value_is_another_job() -> None:
    assert digest_job(parse_job(FILE), OTHER) != digest_job(parse_job(FILE), MODEL)
    for old, new in (("epochs = 2", "epochs = 2.0"), ("rate = 0.5", "rate = '0.5'"), ("m:f", "m:g")):
        assert digest_job(parse_job(FILE.replace(old, new)), MODEL) != digest_job(parse_job(FILE), MODEL)
    digests = {digest_job(read(tables), MODEL) for tables in TABLES[:3]}
    assert len(digests) == 3


@pytest.mark.parametrize("tables", [*TABLES[:3], *(pytest.param(each, marks=pytest.mark.slow) for each in TABLES[3:])])
def test_every_key_is_in_the_digest(tables: str) -> None:
    """What is hashed is the table, so each field of each record must change that of its record."""
    for record in list_records(read(tables)):
        for name in record.__struct_fields__:
            changed = copy.copy(record)
            structs.force_setattr(changed, name, "another value")
            assert to_table(changed) != to_table(record), (type(record), name)


def list_records(record: Struct) -> Iterator[Struct]:
    yield record
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, Struct):
            yield from list_records(value)
        assert not (isinstance(value, Mapping) and any(isinstance(each, Struct) for each in value.values()))
