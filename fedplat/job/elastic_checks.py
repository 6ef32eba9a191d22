"""The checks of a job with elastic averaging: whether what the clients lose is what the centre gains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedplat import codecs, modes
from fedplat.aggregate.easgd import NAME
from fedplat.config.plugins import name_of
from fedplat.job import combinations, tables

REASONS: Mapping[str, str] = {
    "privacy": (
        "a client's difference from the centre is not clipped and comes from all its rounds, so the noise of one round "
        "does not cover it; expected no [privacy], or another rule"
    ),
    "secure_aggregation": (
        "the server decodes a mean of clipped updates, and a client would lose more than that; expected no "
        "[secure_aggregation], or another rule"
    ),
    "robust": (
        "such a rule leaves out or shortens some of the updates, which their clients have given away; expected no "
        "[robust], or another rule"
    ),
}
_GAINS_LESS = {combinations.DOWNLINK: "the centre would gain less than the clients lose; expected none"}


def check_elastic(spec: tables.JobTables) -> None:
    """Raise `ValueError`, with all mistakes in one message, if exchanges would not conserve x̃ + Σ x_i."""
    if mistakes := [*combinations.explain(spec, combinations.ELASTIC, REASONS), *_change_mistakes(spec)]:
        raise ValueError(f'aggregation.rule = "{NAME}": ' + "; ".join(mistakes))


def _change_mistakes(spec: tables.JobTables) -> Iterator[str]:
    if spec.updates.clips:
        yield (
            "updates.clip_norm, updates.adaptive_clip: a client would lose more than the centre gains; expected none, "
            "or updates.max_norm, which refuses an update as a whole"
        )
    uplink = spec.compression.uplink
    if uplink is not None and not isinstance(uplink, codecs.Plain):
        yield (
            f'compression.uplink: with the codec "{name_of(uplink)}" the centre would not gain exactly what the client '
            'loses; expected none, or { codec = "none", zstd = true }'
        )
    yield from combinations.explain(spec, combinations.ELASTIC, _GAINS_LESS)
    if isinstance(spec.mode, modes.Buffered) and spec.mode.staleness != modes.ConstantStaleness():
        yield (
            f'mode.staleness = "{name_of(spec.mode.staleness)}": what stale clients have lost must count as a '
            'whole; expected "constant"'
        )
