"""The dashboard and the alerts of `docker/observability` fit what a live server shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.server import ROOT, common_server

FOLDER = ROOT / "docker" / "observability"
ALERTS, DASHBOARD = FOLDER / "alerts.yml", FOLDER / "grafana" / "headrace.json"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus"
)
# Names that SGLang gives, and that promtool's style does not have.
KNOWN = {
    "generation_tokens_histogram metric name should not include type 'histogram'",
    "prompt_tokens_histogram metric name should not include type 'histogram'",
}


@pytest.fixture(scope="module")
def page() -> str:
    server = common_server()
    # Metrics of requests appear with the first one.
    body = {"text": "a", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    assert server.client.post("/generate", json=body).status_code == 200
    return server.client.get("/metrics").text


def promtool(*arguments: str, given: str = "", cwd: Path = FOLDER) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, text=True, cwd=cwd, timeout=60
    )


@pytest.mark.parametrize("path", [ALERTS, DASHBOARD], ids=lambda path: path.name)
def test_each_name_is_one_of_a_live_server(page: str, path: Path) -> None:
    shown = set(re.findall(r"^([\w:]+)[{ ]", page, re.MULTILINE))
    used = set(re.findall(r"sglang:\w+", path.read_text()))
    assert len(used) > 10
    assert used <= shown


def test_the_labels_are_those_of_a_live_server(page: str) -> None:
    labels = set(re.findall(r"(\w+)=\"", page)) | {"instance", "job", "le"}
    text = ALERTS.read_text() + DASHBOARD.read_text().replace('\\"', '"')
    used = {name for group in re.findall(r"by \(([^)]*)\)", text) for name in group.split(", ")}
    used |= set(re.findall(r"[{,] ?(\w+)[!=]~?\"", text))
    assert {"status_code", "endpoint", "stage", "model_name"} <= used
    assert used <= labels


def test_every_alert_says_what_it_means() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_panels_do_not_overlap_and_have_queries() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["targets"]


def test_the_compose_file_mounts_what_is_there() -> None:
    services = yaml.safe_load((FOLDER / "compose.yml").read_text())["services"]
    mounted = [each for service in services.values() for each in service.get("volumes", ())]
    assert len(mounted) == 5
    assert all((FOLDER / each.split(":")[0]).is_file() for each in mounted)
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["headrace:30000"]


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    for arguments in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_dashboards_queries(tmp_path: Path) -> None:
    rules = []
    for index, target in enumerate(
        target
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", ())
    ):
        query = re.sub(r"\$(model|instance)", ".*", target["expr"])
        query = query.replace("$__rate_interval", "1m")
        rules.append({"record": f"query:{index}", "expr": query})
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = promtool("check", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_metrics(page: str) -> None:
    done = promtool("check", "metrics", given=page.replace("sglang:", ""))
    # 3: it parsed all, and has remarks on style.
    assert done.returncode in (0, 3), done.stderr
    assert set(done.stderr.splitlines()) <= KNOWN


@needs_promtool
def test_promtool_takes_the_page_as_it_is() -> None:
    page = common_server().client.get("/metrics?prefix=headrace_").text
    assert "\nheadrace_num_running_reqs{" in page
    done = promtool("check", "metrics", given=page)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
