"""Measure SecAgg+ of Flower: the CPU time and the bytes of a client and of the server; print one JSON object.

    .venv-peers/bin/python benchmarks/peers/flower_secagg.py CLIENTS SHARES THRESHOLD DROPPED PARAMETERS

The functions are those of its client mod and of its server workflow, called without its network. Secrets and shares are
real; the vectors of the clients that are not measured are not, since no time depends on their values.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import sys
import time
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat

# Their packages have functions and classes of the same names.
client: Any = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
server: Any = importlib.import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow")
CLIPPING, TARGET, MODULUS, MAX_WEIGHT = 8.0, 1 << 22, 1 << 32, 1000.0
"""The defaults of its workflow."""


class Group:
    """The clients of a round, their keys and their shares."""

    def __init__(self, num_clients: int, num_shares: int, threshold: int) -> None:
        self.ids = list(range(1, num_clients + 1))
        self.num_shares, self.threshold = num_shares, threshold
        half = num_shares // 2
        self.neighbours = {
            each: {self.ids[(index + offset) % num_clients] for offset in range(-half, half + 1)}
            for index, each in enumerate(self.ids)
        }
        pairs = {each: (client.generate_key_pairs(), client.generate_key_pairs()) for each in self.ids}
        self.keys = {each: (own[0][0], own[1][0]) for each, own in pairs.items()}
        self.public = {each: [client.public_key_to_bytes(pair[1]) for pair in own] for each, own in pairs.items()}

    def secrets(self, node: int) -> tuple[bytes, bytes]:
        """Return the shared secrets of a client: a seed and the key of its masks."""
        return os.urandom(32), client.private_key_to_bytes(self.keys[node][0])


def measure_client(group: Group, num_parameters: int) -> dict[str, float]:
    """Return the CPU seconds of the client 1, and the bytes that it sends and receives."""
    state = client.SecAggPlusState()
    state.nid = 1
    setup = {
        Key.SAMPLE_NUMBER: len(group.ids),
        Key.SHARE_NUMBER: group.num_shares,
        Key.THRESHOLD: group.threshold,
        Key.CLIPPING_RANGE: CLIPPING,
        Key.TARGET_RANGE: TARGET,
        Key.MOD_RANGE: MODULUS,
        Key.MAX_WEIGHT: MAX_WEIGHT,
    }
    update = ndarrays_to_parameters([np.random.default_rng(1).normal(size=num_parameters).astype(np.float32)])
    begun = time.process_time()
    advertised = client._setup(state, setup)
    spent = time.process_time() - begun
    group.public[1] = [advertised[Key.PUBLIC_KEY_1], advertised[Key.PUBLIC_KEY_2]]
    neighbours = sorted(group.neighbours[1])
    keys = {str(each): group.public[each] for each in neighbours}
    begun = time.process_time()
    shared = client._share_keys(state, keys)
    spent += time.process_time() - begun
    ciphertexts: list[bytes] = []
    own = client.bytes_to_public_key(state.pk2)
    for each in neighbours[1:]:
        shares = [create_shares(secret, group.threshold, group.num_shares) for secret in group.secrets(each)]
        place = sorted(group.neighbours[each]).index(1)
        plain = share_keys_plaintext_concat(each, 1, *(found[place] for found in shares))
        ciphertexts.append(encrypt(generate_shared_key(group.keys[each][1], own), plain))
    collected: dict[str, Any] = {Key.CIPHERTEXT_LIST: ciphertexts, Key.SOURCE_LIST: neighbours[1:]}
    begun = time.process_time()
    masked = client._collect_masked_vectors(state, collected, 10, update)
    answered = client._unmask(state, {Key.ACTIVE_NODE_ID_LIST: neighbours[:-1], Key.DEAD_NODE_ID_LIST: neighbours[-1:]})
    spent += time.process_time() - begun
    return {
        "client_s": spent,
        "update_bytes": sum(map(len, masked[Key.MASKED_PARAMETERS])),
        "sent_bytes": sum(map(len, [*group.public[1], *shared[Key.CIPHERTEXT_LIST], *answered[Key.SHARE_LIST]])),
        "received_bytes": sum(map(len, [*ciphertexts, *(key for pair in keys.values() for key in pair)])),
    }


def measure_server(group: Group, num_dropped: int, num_parameters: int) -> dict[str, float]:
    """Return the CPU seconds of the server to remove the masks."""
    dropped = set(group.ids[:: len(group.ids) // num_dropped][:num_dropped])
    held: dict[int, dict[int, bytes]] = {each: {} for each in group.ids}
    for each in group.ids:
        shares = create_shares(group.secrets(each)[each in dropped], group.threshold, group.num_shares)
        for holder, share in zip(sorted(group.neighbours[each]), shares, strict=True):
            held[holder][each] = share
    state = server.WorkflowState(
        sampled_node_ids=set(group.ids),
        active_node_ids=set(group.ids) - dropped,
        threshold=group.threshold,
        clipping_range=CLIPPING,
        quantization_range=TARGET,
        mod_range=MODULUS,
        nid_to_neighbours=group.neighbours,
        nid_to_publickeys=group.public,
        aggregate_ndarrays=[np.array([10]), np.random.default_rng(2).integers(0, MODULUS, num_parameters)],
    )
    answers = [answer(node, shares) for node, shares in held.items() if node not in dropped]
    grid: Any = SimpleNamespace(send_and_receive=lambda *_, **__: answers)
    state_records = SimpleNamespace(config_records={server.MAIN_CONFIGS_RECORD: {server.WorkflowKey.CURRENT_ROUND: 1}})
    strategy = SimpleNamespace(aggregate_fit=lambda *_: (None, {}))
    context: Any = SimpleNamespace(state=state_records, strategy=strategy)
    server.Message = lambda **_: None  # not sent
    workflow = server.SecAggPlusWorkflow(group.num_shares, group.threshold, timeout=None)
    begun = time.process_time()
    if not workflow.unmask_stage(grid, context, state):
        raise RuntimeError("the masks were not removed")
    return {"server_s": time.process_time() - begun}


def answer(node: int, shares: dict[int, bytes]) -> Any:
    """Return the message of a client with its shares."""
    record = {Key.NODE_ID_LIST: list(shares), Key.SHARE_LIST: list(shares.values())}
    content = SimpleNamespace(config_records={server.RECORD_KEY_CONFIGS: record})
    return SimpleNamespace(metadata=SimpleNamespace(src_node_id=node), has_error=lambda: False, content=content)


def main(num_clients: int, num_shares: int, threshold: int, num_dropped: int, num_parameters: int) -> None:
    """Measure the client and the server."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    random.seed(1)
    group = Group(num_clients, num_shares, threshold)
    found: dict[str, Any] = {"version": metadata.version("flwr"), **measure_client(group, num_parameters)}
    # The client's own key has a place in the tables of the server, and its secret is the server's to recover.
    found |= measure_server(Group(num_clients, num_shares, threshold), num_dropped, num_parameters)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
