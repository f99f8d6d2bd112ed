"""The Helm chart: what it renders is valid, runs without rights, and every value is used."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from runtime.launch.command_line import parse_args
from tools.helm import find

CHART = Path(__file__).resolve().parents[2] / "docker" / "helm" / "headrace"
HELM = find()
KEYS = "keys.existingSecret=llm-keys"
# Kinds whose schemas belong to other projects.
FOREIGN = {"LeaderWorkerSet", "PodMonitor", "ScaledObject"}
EVERYTHING = (
    f"{KEYS},gpus=8,router.enabled=true,router.image=router:1,podMonitor.enabled=true,"
    "autoscaling.enabled=true,networkPolicy.denyEgress=true,cache.existingClaim=kernels,"
    "model.volume.persistentVolumeClaim.claimName=models,"
    "networkPolicy.from[0].podSelector.matchLabels.app=gateway"
)
CASES = {
    "keys": KEYS,
    "open": "keys.open=true,networkPolicy.enabled=false",
    "everything": EVERYTHING,
    "nodes": f"{KEYS},nodes=2,gpus=8",
    "everything on nodes": f"{EVERYTHING},nodes=4",
}

needs_helm = pytest.mark.skipif(
    HELM is None, reason="no helm (python -m tools.helm fetches it on Linux x86-64)"
)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def render(values: str) -> list[dict[str, Any]]:
    done = helm("template", "llm", str(CHART), "--namespace", "serving", "--set", values)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every pod template, as a pod."""
    found = []
    for each in documents:
        spec = each.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        for template in (
            spec.get("template"),
            *map(group.get, ("leaderTemplate", "workerTemplate")),
        ):
            if template:
                metadata = {"name": "x", **template["metadata"]}
                found.append({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata})
    return found


def leaves(values: dict[str, Any], path: str = "") -> list[str]:
    """Every value by its path; an empty mapping, a list or a container's resources is one value."""
    found = []
    for name, value in values.items():
        here = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and value and not here.endswith("resources"):
            found += leaves(value, here)
        else:
            found.append(here)
    return found


def test_every_value_is_used_documented_and_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    templates = "".join(each.read_text() for each in (CHART / "templates").iterdir())
    readme = (CHART / "README.md").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    used = set(re.findall(r"(?:\.Values|\$v)\.([A-Za-z.]+)", templates))
    for leaf in leaves(values):
        assert any(each == leaf or each.startswith(f"{leaf}.") for each in used), leaf
        assert f"`{leaf}`" in readme, leaf
        at = schema
        for part in leaf.split("."):
            at = at["properties"][part]
    documented = re.findall(r"`([A-Za-z.]+)`(?=[^|]*\|[^|]+\|$)", readme, re.M)
    names = {each.split(".")[0] for each in leaves(values)}
    assert {each for each in documented if each.split(".")[0] in names} <= set(leaves(values))


@needs_helm
def test_lint() -> None:
    done = helm("lint", "--strict", str(CHART), "--set", KEYS)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_what_is_rendered_is_valid(case: str) -> None:
    documents = render(CASES[case])
    assert len({(each["kind"], each["metadata"]["name"]) for each in documents}) == len(documents)
    for each in [d for d in documents if d["kind"] not in FOREIGN] + pods(documents):
        for version in ("1.31", "1.34"):
            kubernetes_validate.validate(each, version, strict=True)


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_pods_have_no_rights(case: str) -> None:
    found = pods(render(CASES[case]))
    assert found
    for pod in found:
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        writable = {v["name"] for v in pod["spec"]["volumes"] if "emptyDir" in v}
        assert "tmp" in writable
        for container in pod["spec"]["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_the_server_takes_the_arguments(case: str) -> None:
    found = pods(render(CASES[case]))
    servers = [c for pod in found for c in pod["spec"]["containers"] if c["name"] == "server"]
    for container in servers:
        arguments = [each.replace("$(LWS_WORKER_INDEX)", "1") for each in container["args"]]
        arguments = [each.replace("$(LWS_LEADER_ADDRESS)", "llm-0") for each in arguments]
        config = parse_args(arguments).config
        assert config.http.drain_timeout == 60
        assert config.logging.enable_metrics
        names = {each["name"] for each in container["env"]}
        is_in_group = config.parallel.nnodes > 1
        assert ("HEADRACE_DIST_KEY_FILE" in names) == is_in_group
    for pod in found:
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "server":
            assert pod["spec"]["terminationGracePeriodSeconds"] == 75


@needs_helm
def test_selectors_find_the_servers_and_no_router() -> None:
    documents = render(EVERYTHING)
    labels = [pod["metadata"]["labels"] for pod in pods(documents)]
    by_kind = {each["kind"]: each for each in documents if "router" not in each["metadata"]["name"]}
    selectors = [
        by_kind["Service"]["spec"]["selector"],
        by_kind["Deployment"]["spec"]["selector"]["matchLabels"],
        by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        by_kind["PodMonitor"]["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        matched = [each for each in labels if selector.items() <= each.items()]
        assert [each["app.kubernetes.io/component"] for each in matched] == ["server"]


@needs_helm
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("replicas=1", "keys.existingSecret"),
        (f"{KEYS},router.enabled=true", "router.image"),
        (f"{KEYS},nodes=0", "nodes"),
        (f"{KEYS},replica=2", "replica"),
    ],
)
def test_wrong_values_are_refused(values: str, says: str) -> None:
    done = helm("template", "llm", str(CHART), "--set", values)
    assert done.returncode
    assert says in done.stderr


def test_the_gauge_that_scales_is_served() -> None:
    query = (CHART / "templates" / "scaledobject.yaml").read_text()
    (name,) = re.findall(r"sum\((sglang:[a-z_]+)", query)
    metrics = (CHART.parents[2] / "docs" / "metrics.md").read_text()
    assert f"`{name}` | gauge" in metrics
