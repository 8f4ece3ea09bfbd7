"""Headless browser, controlled over two pipes with the DevTools protocol: no port, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.needs import browser_program

DEADLINE_S = 300
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--remote-debugging-pipe",
)


@dataclass
class Visit:
    """Events while a page was open."""

    requests: list[str] = field(default_factory=list)
    """Addresses that the page requested, including its own."""
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and exceptions of scripts."""


class Browser:
    """Browser that shows one page at a time."""

    def __init__(self, commands: int, answers: int) -> None:
        """Takes the two file descriptors of the protocol."""
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.visit = Visit()

    def open(self, page: Path, width: int = 1280, *, dark: bool = False) -> Visit:
        """Loads a file in a fresh tab of the given width; returns when it has loaded and been quiet for a moment."""
        target = self._call("Target.createTarget", {"url": "about:blank"}, "")["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, "")
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.visit = Visit()
        self.call("Page.navigate", {"url": page.as_uri()})
        self._wait_until_loaded()
        return self.visit

    def call(self, method: str, parameters: Mapping[str, Any] | None = None) -> Any:
        """Sends one command to the open page and returns its result."""
        return self._call(method, parameters, self._session)

    def evaluate(self, script: str) -> Any:
        """Evaluates an expression in the page."""
        result = self.call("Runtime.evaluate", {"expression": script, "returnByValue": True})
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def picture(self, path: Path) -> None:
        """Saves the whole page, to its full height, as PNG."""
        shot = self.call("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))

    def accessible(self) -> list[tuple[str, str]]:
        """Lists (role, name) of everything that a screen reader reads."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]

    def _wait_until_loaded(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") == "about:blank":
            assert time.monotonic() < deadline, "the page does not load"
        self.evaluate("document.fonts.ready, 1")
        time.sleep(0.2)
        self.evaluate("1")  # processes what has arrived meanwhile

    def _call(self, method: str, parameters: Mapping[str, Any] | None, session: str) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": dict(parameters or {})}
        os.write(self._commands, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._answers, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: Mapping[str, Any]) -> None:
        reported = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.visit.requests.append(reported["request"]["url"])
            case "Runtime.exceptionThrown":
                self.visit.complaints.append(json.dumps(reported["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if reported["type"] in ("error", "warning", "assert"):
                self.visit.complaints.append(json.dumps(reported["args"]))
            case "Log.entryAdded" if reported["entry"]["level"] in ("error", "warning"):
                self.visit.complaints.append(reported["entry"]["text"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Starts a browser with an empty profile in the folder `profile`, and ends it with its children."""
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    options = " ".join([*OPTIONS, f"--user-data-dir='{profile}'"])
    program = browser_program()
    assert program, "no chromium is on PATH; install one (launch/browser.sh) or name it in MTRAIN_BROWSER"
    # The browser reads commands from descriptor 3 and answers on 4.
    line = f"exec '{program}' {options} about:blank 3<&{commands_out} 4>&{answers_in} >'{profile}.log' 2>&1"
    process = subprocess.Popen(["bash", "-c", line], pass_fds=(commands_out, answers_in))
    os.close(commands_out)
    os.close(answers_in)
    running = Browser(commands_in, answers_out)
    try:
        yield running
    finally:
        os.close(commands_in)  # the browser ends itself and its children once the pipe is closed
        try:
            process.wait(timeout=600)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=600)
        os.close(answers_out)
