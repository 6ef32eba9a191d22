"""The chart, rendered by helm: what Kubernetes, the Pod Security Standards and the daemon's command line demand of it.

No cluster is needed. `test_pods.py` starts what is rendered.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import typer
import yaml
from kubernetes_validate import utils

from fedplat.cli.app import app as operator_app
from fedplat_server.cli.commands import app as server_app
from support import charts, kubernetes
from support.charts import CHART, MANIFESTS, ROOT, VALUES, render, values_of

VERSIONS = ("1.27", "1.34", "1.37")
"""The oldest version that the chart accepts, and newer ones."""
OF_OPERATORS = {"ServiceMonitor", "PrometheusRule", "HTTPRoute", "BackendTLSPolicy"}
"""Kinds that other projects add to Kubernetes: there are no schemas of them."""
CASES = [(), *map(values_of, VALUES), ("--set", "mtls.enabled=true,dashboard.enabled=true,metrics.enabled=true")]
each_case = pytest.mark.parametrize("options", CASES, ids=lambda case: Path(case[1]).name if case else "defaults")
DOCS = (ROOT / "docs" / "kubernetes.md").read_text()
SERVER, OPERATOR = typer.main.get_command(server_app), typer.main.get_command(operator_app)


def of_kind(objects: tuple[Any, ...], kind: str) -> list[Any]:
    return [item for item in objects if item["kind"] == kind]


def stateful_set(*options: str) -> Any:
    (found,) = of_kind(render(*options), "StatefulSet")
    return found


def pod_of(*options: str) -> Any:
    return stateful_set(*options)["spec"]["template"]["spec"]


@pytest.fixture(scope="module", autouse=True)
def _cache_schemas() -> Iterator[None]:
    # Every validation would read megabytes of JSON again.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@pytest.mark.parametrize("options", [(), *map(values_of, VALUES)], ids=["defaults", *(path.name for path in VALUES)])
def test_helm_finds_nothing_to_criticise(options: tuple[str, ...]) -> None:
    done = charts.run_helm("lint", "--strict", str(CHART), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid_in(version: str) -> None:
    for options in CASES:  # in one test, because the schemas of a version are large
        checked = [item for item in render(*options) if item["kind"] not in OF_OPERATORS]
        assert {"StatefulSet", "Service", "ServiceAccount"} <= {item["kind"] for item in checked}
        for item in checked:
            assert kubernetes_validate.validate(item, version, strict=True) == version


def test_validation_is_strict() -> None:
    broken = copy.deepcopy(stateful_set())
    broken["spec"]["template"]["spec"]["hostNetwrok"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostNetwrok"):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("path", charts.made_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_made_files_are_up_to_date(path: Path) -> None:
    assert path.read_text() == charts.made_files()[path], "run: make manifests"


def test_all_manifests_are_made() -> None:
    assert set(MANIFESTS.iterdir()) <= charts.made_files().keys()


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_work_without_helm(path: Path) -> None:
    items = list(yaml.safe_load_all(path.read_text()))
    for item in items:
        assert kubernetes_validate.validate(item, VERSIONS[-1], strict=True) == VERSIONS[-1]
        assert item["metadata"].get("namespace", "fedplat") == "fedplat"
    assert items[0]["kind"] == "Namespace", "the other objects are in it"
    assert "helm" not in path.read_text().lower()


def test_oldest_version_is_validated() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={VERSIONS[0]}.0-0"
    assert all(version in DOCS for version in VERSIONS)


def test_version_is_that_of_the_code() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "server" / "pyproject.toml").read_text())["project"]["version"]
    assert chart["appVersion"] == version
    assert chart["version"] == version.replace(".dev", "-dev."), "helm requires semantic versions"


# --- security -----------------------------------------------------------------------------------------------------


@each_case
def test_pods_are_restricted(options: tuple[str, ...]) -> None:
    pod = pod_of(*options)
    assert kubernetes.violations(pod) == []
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "variables such as FEDPLAT_PORT would be injected"
    for container in kubernetes.containers(pod):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {"/tmp", "/var/lib/fedplat"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
        assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        (("hostNetwork",), True, "hostNetwork"),
        (("volumes",), [{"name": "host", "hostPath": {"path": "/"}}], "volume host"),
        (("securityContext", "runAsNonRoot"), False, "server: runAsNonRoot"),
        (("securityContext", "seccompProfile"), {"type": "Unconfined"}, "init: seccompProfile"),
        (("containers", 0, "securityContext", "capabilities"), {"drop": ["CHOWN"]}, "server: capabilities"),
    ],
)
def test_violations_are_found(place: tuple[str | int, ...], value: object, found: str) -> None:
    pod = copy.deepcopy(pod_of())
    functools.reduce(lambda node, name: node[name], place[:-1], pod)[place[-1]] = value
    assert found in kubernetes.violations(pod)


def test_processes_have_the_user_of_the_image() -> None:
    users = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "docker" / "Dockerfile.server").read_text(), re.M)
    context = pod_of()["securityContext"]
    assert {(int(user), int(group)) for user, group in users} == {(context["runAsUser"], context["runAsGroup"])}
    assert "runAsUser" not in pod_of("--set", "user=null")["securityContext"]


@each_case
def test_no_secret_is_in_the_release(options: tuple[str, ...]) -> None:
    assert not of_kind(render(*options), "Secret")
    for container in kubernetes.containers(pod_of(*options)):
        for variable in container["env"]:
            assert "value" not in variable or "SECRET" not in variable["name"]


@pytest.mark.parametrize("name", ["single", "scale-postgres-s3", "scale-rwx"])
def test_secrets_and_their_keys_are_documented(name: str) -> None:
    pod = pod_of(*values_of(CHART / "values" / f"{name}.yaml"))
    needed = {
        (volume["secret"]["secretName"], item["key"])
        for volume in pod["volumes"]
        for item in volume.get("secret", {}).get("items", ())
    }
    references = [variable.get("valueFrom", {}).get("secretKeyRef") for variable in pod["containers"][0]["env"]]
    needed |= {(reference["name"], reference["key"]) for reference in references if reference}
    assert bool(needed) == name.startswith("scale")
    for secret, key in needed:
        (command,) = re.findall(rf"^kubectl create secret generic {secret} ((?:.*\\\n)*.*)$", DOCS, re.M)
        in_file = "--from-env-file=" in command and re.search(rf"^{key}=", DOCS, re.M)
        assert f"--from-file={key}=" in command or in_file, (secret, key)


# --- references between objects -----------------------------------------------------------------------------------


@each_case
def test_selectors_and_ports_lead_to_the_pods(options: tuple[str, ...]) -> None:
    objects = render(*options)
    found = stateful_set(*options)
    labels = found["spec"]["template"]["metadata"]["labels"]
    ports = {
        port["name"]: port["containerPort"] for port in found["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    assert found["spec"]["selector"]["matchLabels"].items() <= labels.items()
    services = {item["metadata"]["name"]: item["spec"] for item in of_kind(objects, "Service")}
    assert services[found["spec"]["serviceName"]]["clusterIP"] == "None"
    for service in services.values():
        assert service["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["ports"]} <= ports.keys()
    if "grpc-mtls" in ports:  # the server tells clients the port that it listens on
        numbers = {port["name"]: port["port"] for port in services[found["metadata"]["name"]]["ports"]}
        assert numbers["grpc-mtls"] == ports["grpc-mtls"]
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for item in of_kind(objects, kind):
            selector = item["spec"].get("selector") or item["spec"]["podSelector"]
            assert selector["matchLabels"].items() <= labels.items()
    for item in of_kind(objects, "NetworkPolicy"):
        admitted = {port["port"] for rule in item["spec"]["ingress"] for port in rule["ports"]}
        assert admitted == set(ports.values()) - {ports["health"]}


def test_webhooks_reach_the_networks_that_the_daemon_allows() -> None:
    (policy,) = of_kind(render(*values_of(CHART / "values" / "everything.yaml")), "NetworkPolicy")
    (server,) = pod_of(*values_of(CHART / "values" / "everything.yaml"))["containers"]
    allowed = {word.partition("=")[2] for word in server["args"] if word.startswith("--webhook-network=")}
    open_to = {
        peer["ipBlock"]["cidr"]
        for rule in policy["spec"]["egress"]
        if "ports" not in rule
        for peer in rule["to"]
        if "ipBlock" in peer
    }
    assert allowed == open_to != set()


def test_routes_lead_to_the_dashboard() -> None:
    objects = render(*values_of(CHART / "values" / "everything.yaml"))
    services = {
        item["metadata"]["name"]: {port["name"]: port["port"] for port in item["spec"]["ports"]}
        for item in of_kind(objects, "Service")
    }
    (ingress,), (route,), (policy,) = (of_kind(objects, kind) for kind in ("Ingress", "HTTPRoute", "BackendTLSPolicy"))
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["port"]["name"] in services[path["backend"]["service"]["name"]]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend["port"] in services[backend["name"]].values()
    assert policy["spec"]["targetRefs"][0]["name"] == backend["name"]


def test_prometheus_finds_each_daemon() -> None:
    objects = render(*values_of(CHART / "values" / "everything.yaml"))
    (monitor,) = of_kind(objects, "ServiceMonitor")
    selected = [
        item
        for item in of_kind(objects, "Service")
        if monitor["spec"]["selector"]["matchLabels"].items() <= item["metadata"]["labels"].items()
    ]
    (service,) = selected
    assert service["spec"]["clusterIP"] == "None"
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert monitor["spec"]["jobLabel"] in service["metadata"]["labels"]


def test_board_and_rules_arrive_unchanged() -> None:
    objects = render(*values_of(CHART / "values" / "everything.yaml"))
    (rules,) = of_kind(objects, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((CHART / "files" / "fedplat.rules.yml").read_text())
    (board,) = [item for item in of_kind(objects, "ConfigMap") if "fedplat.json" in item["data"]]
    assert json.loads(board["data"]["fedplat.json"]) == json.loads((CHART / "files" / "fedplat.json").read_text())


@each_case
def test_probes_use_the_port_without_tls(options: tuple[str, ...]) -> None:
    (server,) = pod_of(*options)["containers"]
    (health,) = [port["containerPort"] for port in server["ports"] if port["name"] == "health"]
    assert any(re.fullmatch(rf"--health=.*:{health}", word) for word in server["args"])
    for probe, service in (("startupProbe", "liveness"), ("livenessProbe", "liveness"), ("readinessProbe", "")):
        grpc = server[probe]["grpc"]
        assert (grpc["port"], grpc.get("service", "")) == (health, service)


def test_daemons_have_the_names_of_their_pods() -> None:
    options = values_of(CHART / "values" / "everything.yaml")
    found = stateful_set(*options)
    (advertised,) = [
        variable["value"]
        for variable in found["spec"]["template"]["spec"]["containers"][0]["env"]
        if variable["name"] == "FEDPLAT_ADVERTISE"
    ]
    assert advertised == f"$(POD_NAME).{found['spec']['serviceName']}.fedplat.svc.cluster.example:7443"


def test_one_daemon_has_no_budget_that_blocks_its_node() -> None:
    assert not of_kind(render(), "PodDisruptionBudget")
    assert of_kind(render(*values_of(CHART / "values" / "scale-rwx.yaml")), "PodDisruptionBudget")


@pytest.mark.parametrize(
    ("options", "mode"), [((), "ReadWriteOnce"), (values_of(CHART / "values" / "scale-rwx.yaml"), "ReadWriteMany")]
)
def test_claim_fits_the_number_of_pods(options: tuple[str, ...], mode: str) -> None:
    (claim,) = of_kind(render(*options), "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == [mode]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    volumes = {volume["name"]: volume for volume in pod_of(*options)["volumes"]}
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_object_store_needs_no_claim() -> None:
    options = values_of(CHART / "values" / "scale-postgres-s3.yaml")
    assert not of_kind(render(*options), "PersistentVolumeClaim")
    assert "emptyDir" in next(volume for volume in pod_of(*options)["volumes"] if volume["name"] == "data")


# --- the command line ---------------------------------------------------------------------------------------------


def command_of(container: Any) -> tuple[click.Command, list[str]]:
    """The command of `fedplat-server` that a container runs, and its arguments."""
    words = [*container["command"], *container.get("args", ())]
    assert words.pop(0) == "fedplat-server"
    command = SERVER
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    return command, words


@each_case
def test_arguments_are_those_of_the_command_line(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDPLAT_DATABASE", raising=False)
    checked = 0
    for container in kubernetes.containers(pod_of(*options)):
        if container["name"] == "certificates":
            continue
        command, words = command_of(container)
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word.partition("=")[0] for word in words} <= known
        assert command.make_context(command.name or "", words).params
        checked += 1
    assert checked >= 2


@each_case
def test_variables_are_those_of_the_command_lines(options: tuple[str, ...]) -> None:
    known = set(variables_of(SERVER)) | set(variables_of(OPERATOR))
    for container in kubernetes.containers(pod_of(*options)):
        named = {variable["name"] for variable in container["env"]}
        assert {name for name in named if name.startswith("FEDPLAT_")} <= known


def variables_of(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or ()
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from variables_of(inner)


# --- values -------------------------------------------------------------------------------------------------------

SCALE = ("database.type=postgresql", "database.existingSecret=db", "pki.existingSecret=pki", "storage.type=shared")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["replicas=2"], "replicas is 2, but SQLite serves one daemon: set replicas to 1, or database.type to postgre"),
        (["replicas=2"], "storage.type volume serves one pod: set storage.type to shared"),
        (["replicas=2"], "several daemons share one certificate authority: make a Secret"),
        (["replicas=-1"], "at '/replicas': minimum: got -1, want 0"),
        (["replicas=two"], "at '/replicas': got string, want integer"),
        (["replica=2"], "additional properties 'replica' not allowed"),
        (["storage.object.bucket=x"], "at '/storage/object': additional properties 'bucket' not allowed"),
        (["database.type=mysql"], "at '/database/type': value must be one of 'sqlite', 'postgresql'"),
        (["database.type=postgresql"], "database.type postgresql needs database.existingSecret"),
        (["database.existingSecret=db"], "database.existingSecret is only for database.type postgresql"),
        (["storage.type=shared"], "SQLite is not safe on a network file system"),
        (["storage.type=object"], "storage.type object needs storage.object.blobs and storage.object.spool, such as"),
        (["storage.object.blobs=s3://fed/blobs"], "are only for storage.type object"),
        (["storage.object.blobs=/srv/blobs"], "at '/storage/object/blobs': '/srv/blobs' does not match pattern"),
        (
            [*SCALE[:2], "storage.type=object", "storage.object.blobs=s3://b/b", "storage.object.spool=s3://b/s"],
            "without a volume each start would make another certificate authority",
        ),
        (["storage.size=many"], "at '/storage/size': 'many' does not match pattern"),
        (["hosts={fed.example.org:7443}"], 'hosts: "fed.example.org:7443" is not a name or an address without a port'),
        (["mtls.enabled=true", "service.type=NodePort"], "mtls.enabled does not work with service.type NodePort"),
        (["service.nodePort=30443"], "service.nodePort is only for service.type NodePort or LoadBalancer"),
        (["dashboard.ingress.enabled=true"], "dashboard.ingress.enabled needs dashboard.enabled"),
        (["dashboard.ingress.enabled=true"], "dashboard.ingress.host is missing"),
        (["dashboard.enabled=true", "dashboard.gateway.enabled=true"], "dashboard.gateway needs name"),
        (["metrics.serviceMonitor.enabled=true"], "metrics.serviceMonitor.enabled needs metrics.enabled"),
        (["metrics.jobMetrics={f1}"], "metrics.jobMetrics needs metrics.enabled"),
        (["terminationGracePeriodSeconds=10"], "terminationGracePeriodSeconds is 10, but graceSeconds 10 needs at le"),
        (["user=0"], "at '/user': minimum: got 0, want 1"),
        (["image.digest=latest"], "at '/image/digest': 'latest' does not match pattern"),
    ],
)
def test_wrong_values_are_refused(settings: list[str], message: str) -> None:
    options = tuple(word for setting in settings for word in ("--set", setting))
    with pytest.raises(ValueError, match=re.escape(message)):
        charts.render_text(options)


@pytest.mark.parametrize("replicas", [0, 1, 2, 90])
def test_shared_storage_serves_any_number_of_daemons(replicas: int) -> None:
    options = [word for setting in (*SCALE, f"replicas={replicas}") for word in ("--set", setting)]
    assert stateful_set(*options)["spec"]["replicas"] == replicas


def paths(node: Any, prefix: str = "") -> Iterator[str]:
    """The paths of the leaves of a schema."""
    for name, child in node.get("properties", {}).items():
        if "properties" in child and name != "resources":
            yield from paths(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_value_has_a_schema_a_default_and_a_description() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    described = [key for key, _ in charts.values_keys()]
    assert len(described) == len(set(described))
    assert set(described) == set(paths(schema)) - {"global"}


def test_everything_renders_every_kind() -> None:
    kinds = set(re.findall(r"^kind: (\w+)$", "".join(p.read_text() for p in (CHART / "templates").iterdir()), re.M))
    everything = {item["kind"] for item in render(*values_of(CHART / "values" / "everything.yaml"))}
    assert everything | {"PersistentVolumeClaim"} == kinds
