"""Images, compose, units and the Helm chart: read by the real tools, and every command in them by our own."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import kubernetes_validate
import pytest
import yaml
from helm_python.chart import Chart, lint

from pdx.cli.main import main
from pdx.security.address import check_address, url_host
from pdx.security.curve_keys import KeyPair
from pdx.security.roster import RosterFile

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "pdx"
DOCKERFILES = sorted(DEPLOY.glob("docker/*.Dockerfile"))
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
POD = {
    "pod": {"POD_IP": "10.0.0.9", "HOST_IP": "10.0.0.1"},
    "host": {"POD_IP": "fd00::9", "HOST_IP": "fd00::1", "HOST_NAME": "worker-1"},
}
POD |= {f"{shape} discovers": POD[shape] for shape in POD}
WARNING = 2  # of Helm's severities


def parsed(args):
    """The options of a `pdx` command, which must exist and have values of their kinds."""
    context = main.make_context("pdx", list(args))
    name, command, rest = main.resolve_command(context, list(args))
    assert isinstance(command, click.Command)
    return command.make_context(name, rest, parent=context).params


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles(path):
    subprocess.run([Path(sys.executable).with_name("hadolint"), path], check=True)
    assert (path.with_name(f"{path.name}.dockerignore")).exists()
    (command,) = (line.partition(" ")[2] for line in path.read_text().splitlines() if line.startswith("USER "))
    assert command == "10001:10001"


def test_the_node_image_has_each_channel_and_tier_that_needs_no_library_of_the_host():
    (extras,) = re.findall("^ARG EXTRAS=(.*)", (DEPLOY / "docker/node.Dockerfile").read_text(), re.MULTILINE)
    assert {"redis", "s3", "tls"} <= {*extras.split(",")}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units(path):
    (start,) = (line.partition("=")[2] for line in path.read_text().splitlines() if line.startswith("ExecStart="))
    _, *args = shlex.split(start.replace("$ROLE $MODEL", "prefill m").replace("$FLAGS", "--port 8100"))
    parsed([arg for before, arg in zip(["", *args], args, strict=False) if "--config" not in (before, arg)])
    if not (tool := shutil.which("systemd-analyze")):
        pytest.skip("no systemd-analyze")
    said = subprocess.run([tool, "verify", path], capture_output=True, text=True, check=False).stderr
    assert [line for line in said.splitlines() if path.stem in line and "not executable" not in line] == []


def test_compose():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        if name == "host":
            continue
        command = [str(arg).partition(":-")[2].rstrip("}") or str(arg) for arg in service["command"]]
        parsed(["serve", *command] if name in ("prefill", "decode") else command)
    for name in ("node", "prefill", "decode"):
        assert {services[name][each] for each in ("pid", "ipc", "network_mode")} == {"service:host"}


PODS = ("pdx-prefill-0", "pdx-prefill-1", "pdx-decode-0", "pdx-proxy-0", "pdx-proxy-1")


@pytest.fixture(scope="module")
def keys():
    return {name: KeyPair.make().public for name in (*PODS, "worker-1", "worker-2")}


VALUES = {
    "pod": {"engines": {"prefill": {"replicas": 2}}, "disk": {"size": "10Gi", "limit": "9GiB"}},
    "host": {
        "shape": "host",
        "ipv6": True,
        "hosts": {"worker-1": "fd00::1", "worker-2": "fd00::2"},
        "disk": {"size": "", "hostPath": "/data/pdx"},
        "networkPolicy": {"monitors": [{"namespaceSelector": {}}]},
    },
}
VALUES |= {f"{shape} discovers": {**values, "discover": True, "hosts": {}} for shape, values in VALUES.items()}
VALUES["host discovers"]["networkPolicy"] = {"hosts": ["fd00::/64"]}


@pytest.fixture(scope="module", params=VALUES)
def documents(request, keys):
    values = {"model": "m", "keys": keys, "proxy": {"replicas": 2}, "podMonitor": {"enabled": True}}
    with Chart.load(CHART) as chart:
        rendered = chart.render({**values, **VALUES[request.param]}, name="pdx", namespace="llm")
    each_of = [each for text in rendered.values() for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in each_of}


def test_the_chart_is_well_formed():
    report = lint(CHART, {"model": "m"}, strict=True, kube_version="v1.30.0")
    assert [each for each in report["messages"] if each["severity"] >= WARNING] == []


def test_manifests_are_what_kubernetes_takes(documents):
    for (kind, _), document in documents.items():
        if kind != "PodMonitor":  # of the Prometheus operator
            kubernetes_validate.validate(document, "1.30", strict=True)


def pods(documents):
    """Of each workload: its pods' names, and the template of their containers by name."""
    for (kind, name), document in documents.items():
        if kind in ("StatefulSet", "Deployment", "DaemonSet"):
            spec = document["spec"]
            names = [f"{name}-{number}" for number in range(spec.get("replicas", 1))]
            yield names, {each["name"]: each for each in spec["template"]["spec"]["containers"]}


def test_every_command_of_the_chart_is_one_of_pdx_and_fits_the_roster(documents, request, tmp_path):
    def filled(text, pod):
        for name, value in {**POD[request.node.callspec.id], "POD_NAME": pod}.items():
            text = text.replace(f"$({name})", value)
        assert "$(" not in text
        return text

    path = tmp_path / "roster.toml"
    path.write_text(documents["ConfigMap", "pdx-roster"]["data"]["roster.toml"])
    roster = RosterFile.load(path, has_keys=True)
    said: set[str] = set()
    for names, containers in pods(documents):
        for pod in names:
            if "node" in containers:
                node = parsed([filled(arg, pod) for arg in containers["node"]["args"]])
                said.add(node["name"])
                check_address(node["listen"], has_keys=True, listens=True)
                if node["discover"]:
                    assert (node["proxy"], node["discover"]) == (None, "kubernetes:pdx-peers")
                else:
                    assert node["proxy"].split(",") == [each.address for each in roster.proxies.values()]
                (key,) = (each for each in containers["node"]["volumeMounts"] if each["name"] == "keys")
                assert filled(key["subPathExpr"], pod) == f"{node['name']}.key_secret"
            if "engine" in containers:
                engine = parsed(["serve", *(filled(arg, pod) for arg in containers["engine"]["args"])])
                # Else the proxy would not believe its node (ADR 31).
                found = POD[request.node.callspec.id]
                address = found["HOST_IP"] if "HOST_NAME" in found else found["POD_IP"]
                known = {url_host(each.address) or address for each in roster.nodes.values()}
                assert url_host(engine["url"]) in known
            if "proxy" in containers:
                assert pod in roster.proxies
                parsed([filled(arg, pod) for arg in containers["proxy"]["args"]])
    assert said
    assert said <= set(roster.nodes)


def test_a_pod_that_ends_gets_no_more_requests_and_time_for_those_it_has(documents, request):
    grace = {
        each["spec"]["template"]["spec"].get("terminationGracePeriodSeconds")
        for (kind, _), each in documents.items()
        if kind in ("StatefulSet", "Deployment")
    }
    assert grace == {60}
    for (pod, *_), containers in pods(documents):
        hooks = {
            name: each["lifecycle"]["preStop"]["exec"]["command"]
            for name, each in containers.items()
            if "lifecycle" in each
        }
        if "proxy" in containers:
            assert hooks == {"proxy": ["sleep", "5"]}
            assert parsed(containers["proxy"]["args"])["drain"] == 45
        elif "engine" in containers:
            variables = {**POD[request.node.callspec.id], "POD_NAME": pod}
            told = subprocess.run(
                [*hooks["engine"][:2], f"timeout() {{ printf '%s\\n' \"$@\"; }}\n{hooks['engine'][2]}"],
                env=variables,
                capture_output=True,
                text=True,
                check=True,
            )
            seconds, _, *command = told.stdout.splitlines()
            (url,) = (arg.removeprefix("--url=") for arg in containers["engine"]["args"] if arg.startswith("--url="))
            for name, value in variables.items():
                url = url.replace(f"$({name})", value)
            assert (seconds, command) == ("45", ["cache", "drain", url, "--wait"])
            # A node that ended before its engine could move no KV; and the proxy would forget that the engine ends.
            assert hooks == dict.fromkeys(containers, hooks["engine"])
        else:
            assert hooks == {}  # engines in other pods go on


def test_who_discovers_may_read_what_it_asks_for_and_nobody_else_has_the_token(documents, request):
    if "discovers" not in request.node.callspec.id:
        assert not [kind for kind, _ in documents if kind in ("Role", "ServiceAccount")]
        return
    (rule,) = documents["Role", "pdx"]["rules"]
    assert (rule["resources"], rule["verbs"]) == (["endpointslices"], ["get", "list", "watch"])
    ports = {each["targetPort"] for each in documents["Service", "pdx-peers"]["spec"]["ports"]}
    for (kind, _), document in documents.items():
        if kind not in ("StatefulSet", "Deployment", "DaemonSet"):
            continue
        pod = document["spec"]["template"]["spec"]
        for container in pod["containers"]:
            mounts = {each["mountPath"] for each in container["volumeMounts"]}
            asks = any(arg.startswith("--discover") for arg in container["args"])
            assert (
                ("/var/run/secrets/kubernetes.io/serviceaccount" in mounts) == asks == (container["name"] != "engine")
            )
            assert bool(ports & {each["name"] for each in container["ports"]}) == asks
        assert pod["automountServiceAccountToken"] is False
        assert pod.get("serviceAccountName") == (
            "pdx" if any(each["name"] == "api" for each in pod["volumes"]) else None
        )
