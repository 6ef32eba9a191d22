"""All protocols: importing this module fills the table of `base`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedplat.rounds.protocols import base, private
from fedplat.rounds.protocols.averaging import AVERAGING
from fedplat.rounds.protocols.buffered import BUFFERED
from fedplat.rounds.protocols.cyclic import CYCLIC
from fedplat.rounds.protocols.evaluation import EVALUATION
from fedplat.rounds.protocols.flower_app import FLOWER_APP
from fedplat.rounds.protocols.gossip import GOSSIP
from fedplat.rounds.protocols.procedure import PROCEDURE, SECURE_PROCEDURE
from fedplat.rounds.protocols.secure import SECURE
from fedplat.rounds.protocols.ssp import SSP
from fedplat.rounds.protocols.warm_start import WARM_START

PRIVATE = tuple(base.register(private.wrap(inner)) for inner in (AVERAGING, SECURE))
ALL = (
    AVERAGING,
    BUFFERED,
    SSP,
    CYCLIC,
    SECURE,
    GOSSIP,
    FLOWER_APP,
    PROCEDURE,
    SECURE_PROCEDURE,
    EVALUATION,
    WARM_START,
    *PRIVATE,
)
OF_EVENTS: Mapping[type[Any], base.Handler] = {
    event: handler for protocol in ALL for event, handler in protocol.handlers.items()
}
"""The handlers of the events of one kind: a job of another kind refuses them."""
