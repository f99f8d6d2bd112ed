"""`/docs`: a page that shows the routes and loads nothing from elsewhere."""

import asyncio
import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.fake_server import FakeServer


async def test_the_page_about_the_routes_loads_nothing_from_elsewhere(tmp_path):
    server = FakeServer(tmp_path)
    answer = await server.client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    page = answer.text
    # Not even a name of another place is in it, nor a part that would be fetched.
    assert not re.search(r"//\w|@import|<(?:link|img|iframe|script )", page), page
    # Relative, so that it is found behind a proxy's prefix as well.
    assert 'fetch("openapi.json")' in page
    policy = dict(
        part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert "innerHTML" not in script


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
async def test_the_page_shows_every_route(tmp_path):
    server = FakeServer(tmp_path)
    document = (await server.client.get("/openapi.json")).json()
    (tmp_path / "page.html").write_text((await server.client.get("/docs")).text)
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    script = Path(__file__).parents[2] / "support" / "show_docs_page.mjs"
    command = ["node", str(script), str(tmp_path)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    shown = set(done.stdout.decode().splitlines())
    for path, methods in document["paths"].items():
        assert {f"{method.upper()} {path}" for method in methods} <= shown
    # Opened, a route tells the fields of its body.
    assert {"FIELD /generate sampling_params", "FIELD /v1/score items"} <= shown
