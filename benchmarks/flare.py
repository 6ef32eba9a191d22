"""Rounds of NVFlare in its POC mode: ScatterAndGather with in-time aggregation, over TLS, its default."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from deployment import HERE, START_S
from processes import FailedError, Processes, is_open
from systems import Plan, Sample, peers_environment, require_peers, watch, write_model

APP = HERE / "peers" / "nvflare_app"
PORT = 8002
"""POC mode supports no other port."""
TUNED_S = 0.01
WORKFLOW = "nvflare.app_common.workflows.scatter_and_gather.ScatterAndGather"
GENERATOR = "nvflare.app_common.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator"
AGGREGATOR = "nvflare.app_common.aggregators.intime_accumulate_model_aggregator.InTimeAccumulateWeightedAggregator"


def nvflare(plan: Plan, folder: Path) -> Sample:
    """Measure NVFlare with its default polling intervals."""
    return _nvflare(plan, folder, None)


def nvflare_tuned(plan: Plan, folder: Path) -> Sample:
    """Measure NVFlare with all polling intervals at 0.01 s."""
    return _nvflare(plan, folder, TUNED_S)


def _nvflare(plan: Plan, folder: Path, interval_s: float | None) -> Sample:
    bin_ = require_peers("nvflare")
    if is_open(PORT):
        raise FailedError(f"port {PORT}, which NVFlare's POC mode needs, is in use; stop that program first")
    environment = {**peers_environment(folder / "home"), "NVFLARE_POC_WORKSPACE": str(folder / "poc")}
    write_model(plan, folder / "model.json")
    times = folder / "times.txt"
    _write_job(plan, folder, interval_s)
    with Processes(folder, environment) as processes:
        if not processes.run([bin_ / "nvflare", "poc", "prepare", "-n", str(plan.clients), "--force"], START_S):
            raise FailedError(f"`nvflare poc prepare` failed: {(folder / 'commands.log').read_text()[-600:]}")
        kits = folder / "poc" / "example_project" / "prod_00"
        server = processes.start("server", ["bash", kits / "server" / "startup" / "sub_start.sh", "--once"])
        for number in range(1, plan.clients + 1):
            start = kits / f"site-{number}" / "startup" / "sub_start.sh"
            processes.start(f"site-{number}", ["bash", start, "--once"])
        # NVFlare retries a job with too few clients after a delay that doubles each time.
        joined = f"Total clients: {plan.clients}\n"
        processes.wait("clients", lambda: joined in (folder / "server.log").read_text(errors="replace"), START_S)
        submit = [bin_ / "nvflare", "job", "submit", "-j", folder / "job"]
        submit += ["--startup-kit", kits / "admin@nvidia.com"]
        processes.wait("`nvflare job submit`", lambda: processes.run(submit, START_S), START_S)
        return watch(plan, processes, server, times)


def _write_job(plan: Plan, folder: Path, interval_s: float | None) -> None:
    app = folder / "job" / "app"
    shutil.copytree(APP, app / "custom", ignore=shutil.ignore_patterns("__pycache__"))
    (app / "config").mkdir()
    server, client = job(plan, folder, interval_s)
    (app / "config" / "config_fed_server.json").write_text(json.dumps(server, indent=1))
    (app / "config" / "config_fed_client.json").write_text(json.dumps(client, indent=1))
    meta = {"name": "noop", "resource_spec": {}, "min_clients": plan.clients, "deploy_map": {"app": ["@ALL"]}}
    (folder / "job" / "meta.json").write_text(json.dumps(meta))


def job(plan: Plan, folder: Path, interval_s: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configurations of NVFlare's server and clients. None keeps the default polling intervals."""
    arrays = {"model": str(folder / "model.json"), "times": str(folder / "times.txt")}
    workflow: dict[str, Any] = {
        "min_clients": plan.clients,
        "num_rounds": plan.rounds + 1,
        "wait_time_after_min_received": 0,
        "aggregator_id": "aggregator",
        "persistor_id": "persistor",
        "shareable_generator_id": "generator",
        "train_task_name": "train",
    }
    components = [
        {"id": "persistor", "path": "noop_nvflare.Arrays", "args": arrays},
        {"id": "generator", "path": GENERATOR, "args": {}},
        {"id": "aggregator", "path": AGGREGATOR, "args": {"expected_data_kind": "WEIGHTS"}},
    ]
    workflows = [{"id": "rounds", "path": WORKFLOW, "args": workflow}]
    server: dict[str, Any] = {"format_version": 2, "components": components, "workflows": workflows}
    executors = [{"tasks": ["train"], "executor": {"path": "noop_nvflare.NoopExecutor", "args": {}}}]
    client: dict[str, Any] = {"format_version": 2, "executors": executors}
    for config in (server, client):
        config |= {"task_data_filters": [], "task_result_filters": []}
    if interval_s is not None:
        workflow["task_check_period"] = interval_s
        server["server"] = {"task_request_interval": interval_s}
        client["default_task_fetch_interval"] = interval_s
    return server, client
