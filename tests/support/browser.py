"""Controls headless Chromium over the DevTools protocol, through pipes, without a library."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.guard import unwatch, watch

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
_TIMEOUT_S = 30.0
_OPTIONS = (
    *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe"),
    # No host name but this machine's address can be resolved.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_LAUNCHER = (
    "import os, sys; _, source, sink, *command = sys.argv; "
    "os.dup2(int(source), 3); os.dup2(int(sink), 4); os.execv(command[0], command)"
)
# Virtual key codes of the keys that tests press. Without a code, a key does nothing in some fields.
_KEYS = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    " ": 32,
    "Backspace": 8,
}


class Browser:
    """A running Chromium; a context manager that ends it."""

    def __init__(self) -> None:
        """Start Chromium."""
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        # Chromium needs the file descriptors 3 and 4. The launcher copies the pipes there from
        # numbers that are not 3 or 4.
        high_in, high_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out))
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
        profile = f"--user-data-dir={self._profile.name}"
        command = (CHROMIUM, *_OPTIONS, *sandbox, profile, "about:blank")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, str(high_in), str(high_out), *command],
            pass_fds=(high_in, high_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        watch(self.process.pid)
        for fd in (theirs_in, theirs_out, high_in, high_out):
            os.close(fd)
        self._last_id = 0
        self._read = b""
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        unwatch(self.process.pid)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            answer = self._receive(deadline - time.monotonic())
            assert answer is not None, f"no answer to {method}"
            if answer.get("id") == message["id"]:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._dispatch(answer)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Handle the events that have arrived."""
        while (event := self._receive(timeout_s)) is not None:
            self._dispatch(event)
            timeout_s = 0.0

    def _dispatch(self, event: dict[str, Any]) -> None:
        page = self._pages.get(event.get("sessionId", ""))
        if page is not None:
            page.on_event(event["method"], event["params"])

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        while b"\0" not in self._read:
            if not select.select([self._in], [], [], max(timeout_s, 0.0))[0]:
                return None
            part = os.read(self._in, 1 << 20)
            assert part, "Chromium ended"
            self._read += part
        line, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def page(self, width: int = 1280, height: int = 800, *, scheme: str = "light") -> Page:
        """Open a page that shares no storage with other pages."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.call("Emulation.setEmulatedMedia", features=features)
        return page


class Page:
    """A tab of the browser.

    Attributes:
        errors: errors in the console, including uncaught exceptions.
        requests: URLs of all requests.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        """Use an open tab; called by `Browser.page`."""
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command to this page and return its result."""
        return self._browser.call(method, self._session, **params)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        """Record an error or a request."""
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def resize(self, width: int, height: int) -> None:
        """Resize the window; the size is in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, url: str) -> None:
        """Load a URL."""
        assert "errorText" not in self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait until a JavaScript expression is truthy; an element counts as true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"{expression} never came: {self.text('body')}"
            self._browser.poll(0.02)

    def text(self, selector: str) -> str:
        """Return the visible text of the first element that matches `selector`."""
        value: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return value

    def texts(self, selector: str) -> list[str]:
        """Return the visible text of every element that matches `selector`."""
        query = f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)"
        found: list[str] = self.evaluate(query)
        return found

    def click(self, selector: str, text: str = "") -> None:
        """Click on the last visible element that matches `selector` and contains `text`."""
        query = (
            f"(() => {{ const found = [...document.querySelectorAll({json.dumps(selector)})]"
            f".filter(e => e.innerText.includes({json.dumps(text)}) && e.checkVisibility()).at(-1);"
            "if (!found) return null; found.scrollIntoView({block: 'nearest'});"
            "const box = found.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.wait(query)
        x, y = self.evaluate(query)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        code = _KEYS[key]
        shown = {"Enter": "\r", " ": " "}.get(key)
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        down = {**event, "type": "keyDown", **({"text": shown} if shown else {})}
        self.call("Input.dispatchKeyEvent", **down)
        self.call("Input.dispatchKeyEvent", **event, type="keyUp")

    def attach(self, selector: str, *files: Path) -> None:
        """Choose files in a file input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(file) for file in files], nodeId=node)

    def screenshot(self, path: Path) -> None:
        """Write a screenshot of the window as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
