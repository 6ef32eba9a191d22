"""The coordinator of one decentralised job, as a pure state machine: `step(state, event)` returns state and commands.

    ANNOUNCING → EXCHANGING → ANNOUNCING ...           neighbours and push-sum: one exchange a round
    ANNOUNCING → OFFERING_KEYS → REDUCING → ...        ring: one all-reduce a round, repeated until it succeeds

After the last round, rounds without training follow until the silos seem to agree within the tolerance. Then a ring
computes the mean, each silo reports its distance from it, and the mean is exported if they do agree.

The coordinator never has a model: it draws edges among the silos that announced one, commits those that are confirmed
(both ends of an edge, or the receiver of a link, have reported the announced digest), and sends the rows of W. A row
that a silo may not have received is sent again when it returns.

A ring attempt that loses a silo is repeated without it and with new keys. But a mean of it that silos have stands, and
others get it from them: the difference of two means would reveal the model of the silo that left. So a silo that is
asked for a key and has the mean of the attempt before reports that mean again in place of a key, and it stands then,
too. Only a silo that is away with the mean while the others repeat the ring can compute that difference.

What a single silo reports could be any model. As long as no silo has left, the ring is therefore repeated with the same
silos, which have the same mean, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np

from fedplat.gossip import messages, stated, topology
from fedplat.gossip.state import Consensus, GossipPhase, GossipRules, GossipState
from fedplat.texts import format_count

Step = tuple[GossipState, tuple[messages.GossipCommand, ...]]
_change = dataclasses.replace
_MAX_RESTARTS = 3
"""How often in a round a ring is repeated at once because the same silo gives it up."""


def begin(rules: GossipRules) -> Step:
    """Begin a job: round 1, for which silos train."""
    return _begin_round(GossipState(rules), 1)


def resume(state: GossipState) -> Step:
    """Continue a job that was stopped within a round: ask again for the models of the round.

    Silos that have trained for it do not train again. A mean that a silo has of the round stands. If the rows of the
    round are committed, its models are mixed: then the next round begins.
    """
    is_reducing = state.phase in (GossipPhase.OFFERING_KEYS, GossipPhase.REDUCING)
    if is_reducing and state.rules.options.exchange != "ring":
        return _begin_round(state, state.round + 1)
    begun, commands = _begin_round(state, state.round)
    if is_reducing:
        unfinished = state.offers if state.phase is GossipPhase.REDUCING else state.unfinished
        begun = _change(begun, attempt=state.attempt, unfinished=unfinished)
    return begun, commands


def step(state: GossipState, event: messages.GossipEvent) -> Step:
    """Process one event; one that does not fit the phase, the round or what was announced changes nothing."""
    match event:
        case messages.SiloAnnounced():
            return _on_announced(state, event)
        case messages.ModelReceived():
            return _on_received(state, event)
        case messages.ModelMissed():
            return _on_report(state, event) if _is_link(state, event) else (state, ())
        case messages.KeyOffered():
            return _on_key(state, event)
        case messages.RingCompleted():
            return _on_completed(state, event)
        case messages.RingBroken():
            return _on_broken(state, event)
        case messages.SiloDeparted():
            return _on_departed(state, event)
        case messages.SiloReturned():
            return _on_returned(state, event)
        case messages.TimerPassed():
            return _on_timer(state) if event.timer == state.timer else (state, ())


def takes_model(state: GossipState, event: messages.SiloAnnounced) -> bool:
    """Return whether a silo takes part in the round with the model that it announces."""
    is_current = state.phase is GossipPhase.ANNOUNCING and event.round == state.round
    return is_current and _find_missed(state, event) is None


def _find_missed(
    state: GossipState, event: messages.SiloAnnounced
) -> messages.CommitRow | messages.CommitAverage | None:
    """Return what the announced model lacks: a round that its neighbours have mixed, or the mean of a ring."""
    row, average = state.rows.get(event.silo), state.average
    if row is not None and event.mixed_round < row.round:
        return row
    is_ring = state.rules.options.exchange == "ring"
    return average if is_ring and average is not None and event.mixed_round < average.round else None


def _on_announced(state: GossipState, event: messages.SiloAnnounced) -> Step:
    if (missed := _find_missed(state, event)) is not None:
        return state, (missed,)
    rows = {silo: each for silo, each in state.rows.items() if silo != event.silo}
    state = _change(state, rows=rows, away=state.away - {event.silo}, members=state.members | {event.silo})
    if state.phase is not GossipPhase.ANNOUNCING or event.round != state.round:
        return state, ()
    state = _change(state, announced={**state.announced, event.silo: event.model})
    return _close_announcing(state) if state.has_all else (state, ())


def _on_received(state: GossipState, event: messages.ModelReceived) -> Step:
    sender = state.announced.get(event.sender)
    if not _is_link(state, event) or sender is None or event.digest != sender.digest:
        return state, ()
    distances = {**state.received.get(event.silo, {}), event.sender: event.squared_distance}
    return _on_report(_change(state, received={**state.received, event.silo: distances}), event)


def _is_link(state: GossipState, event: messages.ModelReceived | messages.ModelMissed) -> bool:
    is_current = state.phase is GossipPhase.EXCHANGING and event.round == state.round
    return is_current and event.sender in state.senders.get(event.silo, ())


def _on_report(state: GossipState, event: messages.ModelReceived | messages.ModelMissed) -> Step:
    awaited = dict(state.awaited)
    if left := awaited.pop(event.silo, frozenset()) - {event.sender}:
        awaited[event.silo] = left
    state = _change(state, awaited=awaited)
    return _commit_rows(state) if _is_exchanged(state) else (state, ())


def _on_key(state: GossipState, event: messages.KeyOffered) -> Step:
    row = state.rows.get(event.silo)
    if row is not None and event.mixed_round < row.round:
        return state, (row,)
    is_current = state.phase is GossipPhase.OFFERING_KEYS and (event.round, event.attempt) == (
        state.round,
        state.attempt,
    )
    if not is_current or event.silo not in state.candidates:
        return state, ()
    state = _change(state, offers={**state.offers, event.silo: event})
    return _begin_ring(state) if len(state.offers) == len(state.candidates) else (state, ())


def _on_completed(state: GossipState, event: messages.RingCompleted) -> Step:
    is_current = state.phase is GossipPhase.REDUCING and (event.round, event.attempt) == (state.round, state.attempt)
    if not is_current or event.silo not in state.offers:
        return _on_late_mean(state, event)
    return _close_if_reduced(_change(state, completed={**state.completed, event.silo: event}))


def _on_broken(state: GossipState, event: messages.RingBroken) -> Step:
    is_current = state.phase is GossipPhase.REDUCING and (event.round, event.attempt) == (state.round, state.attempt)
    if not is_current or event.silo not in state.offers:
        return state, ()
    number = state.restarts.get(event.silo, 0)
    if event.sender == event.silo and number < _MAX_RESTARTS:
        # As after a restart: it has lost its key and its chunks, and the silos after it would wait for them until the
        # deadline. It does not count as a failure. Beyond the limit they do wait, and suspect it, so that no silo can
        # repeat a ring again and again.
        restarts = {**state.restarts, event.silo: number + 1}
        return _close_ring(_change(state, restarts=restarts, failures=state.failures - 1))
    if event.silo in state.completed:
        return state, ()
    state = _change(state, broken={**state.broken, event.silo: event})
    return _close_if_reduced(state)


def _close_if_reduced(state: GossipState) -> Step:
    """Close the ring if each silo of it has the mean, has given up or has left."""
    done = state.completed.keys() | state.broken.keys()
    return _close_ring(state) if done >= state.offers.keys() - state.away else (state, ())


def _on_late_mean(state: GossipState, event: messages.RingCompleted) -> Step:
    """Let the mean of the attempt before stand if it may, unless the next attempt has begun."""
    offer = state.unfinished.get(event.silo)
    if state.phase is not GossipPhase.OFFERING_KEYS or offer is None:
        return state, ()
    if (event.round, event.attempt) != (offer.round, offer.attempt):
        return state, ()
    state = _change(state, late={**state.late, event.silo: event})
    state = _change(state, offers={silo: each for silo, each in state.offers.items() if silo in state.candidates})
    return _close_late(state, state.candidates) or (state, ())


def _close_late(state: GossipState, members: Iterable[str]) -> Step | None:
    """Commit the mean of the attempt before if it stands; None if it does not. `members` are those of the next ring."""
    digest = stated.find_mean(state, state.unfinished, state.late, members)
    return _commit_mean(state, digest, state.late) if digest is not None else None


def _on_departed(state: GossipState, event: messages.SiloDeparted) -> Step:
    if event.silo in state.away:
        return state, ()  # a ring is repeated once for each silo that leaves
    state = _change(state, away=state.away | {event.silo}, members=state.members - {event.silo})
    match state.phase:
        case GossipPhase.ANNOUNCING if state.has_all:
            return _close_announcing(state)
        case GossipPhase.EXCHANGING if _is_exchanged(state):
            return _commit_rows(state)
        case GossipPhase.OFFERING_KEYS if event.silo in state.announced:
            return _close_late(state, state.candidates) or _repeat_ring(state, f"{event.silo} left")
        case GossipPhase.REDUCING if event.silo in state.offers and event.silo not in state.completed:
            return _close_ring(state)
        case _:
            return state, ()


def _on_returned(state: GossipState, event: messages.SiloReturned) -> Step:
    if event.silo not in state.away or event.silo in state.announced:
        return state, ()  # what it announced before it left does not count
    return _change(state, away=state.away - {event.silo}, members=state.members | {event.silo}), ()


def _on_timer(state: GossipState) -> Step:
    match state.phase:
        case GossipPhase.ANNOUNCING:
            return _close_announcing(state)
        case GossipPhase.EXCHANGING:
            return _commit_rows(state)
        case GossipPhase.OFFERING_KEYS:
            if (closed := _close_late(state, state.offers)) is not None:
                return closed
            if len(state.offers) >= state.rules.minimum:
                return _begin_ring(state)
            return _repeat_ring(state, f"{format_count(len(state.offers), 'silo')} offered keys")
        case GossipPhase.REDUCING:
            return _close_ring(state)
        case GossipPhase.ENDED:
            return state, ()


def _begin_round(state: GossipState, number: int) -> Step:
    state = _enter(state, GossipPhase.ANNOUNCING)
    state = _change(
        state,
        round=number,
        attempt=0,
        announced={},
        edges=frozenset(),
        senders={},
        awaited={},
        received={},
        failures=0,
        unfinished={},
        late={},
        suspects=frozenset(),
        excluded=frozenset(),
        restarts={},
        left_out={},
        reason="",
    )
    timer = messages.SetTimer(state.timer, state.rules.training_s)
    return state, (messages.BeginRound(number, number <= state.rules.rounds), timer)


def _enter(state: GossipState, phase: GossipPhase) -> GossipState:
    return _change(state, phase=phase, timer=state.timer + 1, offers={}, ring=None, completed={}, broken={})


def _close_announcing(state: GossipState) -> Step:
    """Begin the exchange among the silos that are there, or wait once more."""
    names = state.present
    if len(names) < state.rules.minimum:
        reason = f"{format_count(len(names), 'silo')} announced a model for round {state.round}"
        reason += f"; expected {state.rules.minimum}"
        return _try_again(state, GossipPhase.ANNOUNCING, reason, state.rules.training_s)
    if state.rules.options.exchange == "ring":
        return _request_keys(_change(state, attempt=state.attempt + 1))
    options = state.rules.options
    edges = [(names[a], names[b]) for a, b in topology.draw_edges(options, names, state.round).tolist()]
    links = {name: set[str]() for name in names}  # the senders of each receiver
    for first, second in edges:
        links[second].add(first)
        if not options.is_directed:
            links[first].add(second)
    senders = {name: frozenset(each) for name, each in links.items() if each}
    state = _enter(state, GossipPhase.EXCHANGING)
    state = _change(state, edges=frozenset(edges), senders=senders, awaited=senders)
    if not edges:
        return _commit_rows(state)
    assigns = tuple(
        messages.AssignNeighbours(
            state.round, name, tuple(messages.Neighbour(each, state.announced[each]) for each in sorted(links[name]))
        )
        for name in names
    )
    return state, (*assigns, messages.SetTimer(state.timer, state.rules.exchange_s))


def _is_exchanged(state: GossipState) -> bool:
    """Return whether each model has been received or missed, or its receiver or sender has left."""
    return all(silo in state.away or senders <= state.away for silo, senders in state.awaited.items())


def _commit_rows(state: GossipState) -> Step:
    """Commit the confirmed edges, and begin the next round, the mean, or the end."""
    names, options = sorted(state.announced), state.rules.options
    positions = {name: position for position, name in enumerate(names)}
    pairs = [
        (first, second)
        for first, second in sorted(state.edges)
        if _has_received(state, second, first) and (options.is_directed or _has_received(state, first, second))
    ]
    edges = np.array([(positions[a], positions[b]) for a, b in pairs], np.int64).reshape(-1, 2)
    links = (topology.push_sum if options.is_directed else topology.metropolis)(len(names), edges)
    rows: dict[str, messages.CommitRow] = {}
    for name, position in positions.items():
        own, weights = links.row(position)
        rows[name] = messages.CommitRow(state.round, name, own, tuple((names[j], weight) for j, weight in weights))
    consensus = stated.measure_round(state, names, edges, pairs)
    masses = {**state.masses, **stated.push_masses(state.masses, rows)} if options.is_directed else state.masses
    state = _change(state, rows={**state.rows, **rows}, masses=masses, confirmed=len(pairs), consensus=consensus)
    following, commands = _continue(state)
    return following, (*rows.values(), *commands)


def _has_received(state: GossipState, receiver: str, sender: str) -> bool:
    return sender in state.received.get(receiver, ())


def _continue(state: GossipState) -> Step:
    if state.round < state.rules.rounds:
        return _begin_round(state, state.round + 1)
    if state.consensus.relative <= state.rules.options.tolerance:
        return _request_keys(_change(state, attempt=1, failures=0))
    return _settle(state)


def _settle(state: GossipState) -> Step:
    """Begin a round without training, if there may be one more."""
    rules, relative = state.rules, state.consensus.relative
    if state.round < rules.rounds + rules.options.settle_rounds:
        return _begin_round(state, state.round + 1)
    apart = f"{relative:.3g} of their norm" if math.isfinite(relative) else "an unknown distance"
    lost, remedies = len(state.edges) - state.confirmed, "more settle_rounds or a topology with more edges"
    if lost:
        remedies = f"messages that arrive ({lost} of {len(state.edges)} edges were lost in the last round), {remedies}"
    return _fail(
        state,
        f"the silos do not agree after {format_count(rules.options.settle_rounds, 'round')} without training: their "
        f"models are {apart} apart, and tolerance is {rules.options.tolerance:g}; expected {remedies}",
    )


def _request_keys(state: GossipState) -> Step:
    state = _enter(state, GossipPhase.OFFERING_KEYS)
    request = messages.RequestKeys(state.round, state.attempt, tuple(state.candidates))
    return state, (request, messages.SetTimer(state.timer, state.rules.exchange_s))


def _begin_ring(state: GossipState) -> Step:
    outliers = stated.find_outliers({silo: offer.largest for silo, offer in state.offers.items()})
    if outliers:
        state = _change(
            state,
            excluded=state.excluded.union(outliers),
            left_out={**state.left_out, **outliers},
            offers={silo: offer for silo, offer in state.offers.items() if silo not in outliers},
        )
        if len(state.offers) < state.rules.minimum:
            return _repeat_ring(state, "; ".join(f"{silo}: {text}" for silo, text in outliers.items()))
    offers = dict(sorted(state.offers.items()))
    weights = stated.weigh(state, offers)
    num_weighed = sum(weight > 0.0 for weight in weights.values())
    if num_weighed < state.rules.minimum:
        return _fail(
            state,
            f"{num_weighed} of the {len(weights)} silos of a ring have examples to weigh their models by, and their "
            f"mean would reveal them; expected {state.rules.minimum}",
        )
    total = math.fsum(weights.values())
    places = tuple(
        messages.RingPlace(
            name, state.announced[name].address, offers[name].key, weights[name] / total, offers[name].signature
        )
        for name in stated.draw_order(state, list(offers))
    )
    ring = messages.BeginRing(state.round, state.attempt, places, max(offer.largest for offer in offers.values()))
    state = _change(_enter(state, GossipPhase.REDUCING), offers=offers, ring=ring)
    return state, (ring, messages.SetTimer(state.timer, state.rules.exchange_s))


def _close_ring(state: GossipState) -> Step:
    """Commit the mean if it stands, or that of the attempt before; else repeat the ring without those that left."""
    state = stated.add_broken_links(state)
    digest = stated.find_mean(state, state.offers, state.completed, state.candidates)
    if digest is not None:
        return _commit_mean(state, digest, state.completed)
    if (closed := _close_late(state, state.candidates)) is not None:
        return closed
    gone = ", ".join(sorted(state.offers.keys() - state.completed.keys()))
    is_unknown = len({event.digest for event in state.completed.values()}) <= 1
    state = stated.keep_unfinished(state) if is_unknown else _change(state, unfinished={}, late={})
    return _repeat_ring(state, f"no mean of {gone}" if is_unknown else "the silos have different means")


def _commit_mean(state: GossipState, digest: str, reports: Mapping[str, messages.RingCompleted]) -> Step:
    """Commit the mean that silos have reported: the next model of all, or the end of the job if they agree."""
    holders = {silo: event for silo, event in reports.items() if event.digest == digest}
    away = stated.average_stated([event.squared_distance for event in holders.values()])
    norm = math.sqrt(stated.average_stated([model.squared_norm for model in state.announced.values()]))
    distance = math.sqrt(away)
    state = _change(state, consensus=Consensus(bound=distance, estimate=distance, norm=norm))
    if state.rules.options.exchange != "ring" and state.consensus.relative > state.rules.options.tolerance:
        return _settle(state)
    average = messages.CommitAverage(state.round, digest, tuple(sorted(holders)))
    state = _change(state, average=average)
    if state.rules.options.exchange == "ring" and state.round < state.rules.rounds:
        following, commands = _begin_round(state, state.round + 1)
        return following, (average, *commands)
    ended, commands = _end(state, messages.EndJob("COMPLETED", average.digest))
    return ended, (average, *commands)


def _repeat_ring(state: GossipState, reason: str) -> Step:
    state = _change(state, attempt=state.attempt + 1)
    if len(state.candidates) < state.rules.minimum:
        return _fail(
            state,
            f"round {state.round}: {format_count(len(state.candidates), 'silo')} left for a ring ({reason}); expected "
            f"{state.rules.minimum}",
        )
    following, commands = _try_again(state, GossipPhase.OFFERING_KEYS, reason, state.rules.exchange_s)
    if following.phase is GossipPhase.ENDED:
        return following, commands
    return following, (messages.RequestKeys(state.round, state.attempt, tuple(following.candidates)), *commands)


def _try_again(state: GossipState, phase: GossipPhase, reason: str, seconds: float) -> Step:
    failures = state.failures + 1
    if 0 < state.rules.max_attempts <= failures:
        return _fail(state, f"{reason}; {format_count(failures, 'attempt')} failed (retry.max_attempts)")
    state = _change(_enter(state, phase), failures=failures, reason=reason)
    return state, (messages.SetTimer(state.timer, seconds),)


def _fail(state: GossipState, reason: str) -> Step:
    return _end(state, messages.EndJob("FAILED", reason=reason))


def _end(state: GossipState, outcome: messages.EndJob) -> Step:
    return _change(_enter(state, GossipPhase.ENDED), outcome=outcome), (outcome,)
