"""The settings of a job file for the compression of updates."""

from __future__ import annotations

import pytest

from fedplat import codecs
from fedplat.errors import JobFileError
from fedplat.job import Compression, parse_job
from support.jobs import SMALL


def test_nothing_is_compressed_by_default() -> None:
    compression = parse_job(SMALL).compression
    assert (compression, compression.names) == (Compression(), frozenset())


@pytest.mark.parametrize("name", codecs.CODECS)
@pytest.mark.parametrize("table", ["[compression.uplink]\ncodec = '{}'", "[compression]\nuplink = {{codec = '{}'}}"])
def test_each_codec_has_a_name_in_job_files(name: str, table: str) -> None:
    compression = parse_job(SMALL + table.format(name)).compression
    assert compression.uplink == codecs.CODECS[name]()
    assert compression.names == {name}


@pytest.mark.parametrize("name", codecs.CODECS)
def test_versions_are_sent_with_each_codec_to_clients_that_know_it(name: str) -> None:
    compression = parse_job(SMALL + f"[compression]\ndownlink = {{codec = '{name}'}}\n").compression
    assert (compression.uplink, compression.downlink) == (None, codecs.CODECS[name]())
    assert compression.names == frozenset()


@pytest.mark.parametrize(
    ("table", "mistake"),
    [
        ("[compression.downlink]\ncodec = 'bf61'", "compression.downlink.codec = 'bf61': expected one of "),
        ("[compression.downlink]\ncodec = 'eden'\nbits = 9", "compression.downlink.bits = 9: expected one of "),
        ("[compression]\ndownlink = 'bf16'", "compression.downlink = 'bf16': expected a table"),
        ("[compression.uplink]\ncodec = 'bf61'", "compression.uplink.codec = 'bf61': expected one of "),
        ("[compression.uplink]\ncodec = 16", "compression.uplink.codec = 16: expected one of "),
        ("[compression.uplink]", "compression.uplink.codec: this key is required and missing; expected one of "),
        ("[compression.uplink]\ncodec = 'bf16'\nbits = 4", "compression.uplink.bits = 4: there is no such key"),
        ("[compression]\nuplink = 'bf16'", "compression.uplink = 'bf16': expected a table, [compression.uplink]"),
        ("[compression]\ncodec = 'bf16'", "compression.codec = 'bf16': there is no such key"),
    ],
)
def test_mistakes_are_named(table: str, mistake: str) -> None:
    with pytest.raises(JobFileError) as caught:
        parse_job(SMALL + table)
    assert str(caught.value).startswith(mistake)
