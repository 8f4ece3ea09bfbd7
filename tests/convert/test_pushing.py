"""`mtrain convert export --push`: huggingface_hub uploads to a server on loopback that records requests."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.base.errors import ConfigError, MachineError
from mtrain.convert.importing import import_hf
from mtrain.convert.pushing import logged_in
from tests.cli.command_line import call
from tests.hf.folders import save
from tests.messages import check_message, refuses

TOKEN = "hf_" + "a" * 34


class Hub(ThreadingHTTPServer):
    """The part of the Hub's API that an upload calls; files come inside the commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories: dict[str, bool] = {}
        """Name -> whether it is private."""
        self.files: dict[str, bytes] = {}
        self.is_full = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(*((200, {"name": "org", "type": "user", "orgs": []}) if self._is_known() else (401, {})))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        if not self._is_known():
            self._answer(401, {})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.repositories[name] = asked.get("private", asked.get("visibility") == "private")
            self._answer(200, {"url": f"{self.server.address}/{name}"})
        elif "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self._answer(200, {"files": [{**file, "shouldIgnore": False, "oid": None} for file in files]})
        elif "/commit/" in self.path and not self.server.is_full:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            name = self.path.split("/commit/")[0].removeprefix("/api/models/")
            url = f"{self.server.address}/{name}/commit/{'c' * 40}"
            self._answer(200, {"commitUrl": url, "commitOid": "c" * 40, "success": True})
        else:
            self._answer(507, {"error": "no room is left"})

    def _chunk(self) -> bytes:
        data = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return data

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Starts a hub, and logs in."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # read when the package is imported
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", str(tmp_path / "stored_tokens"))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pushing")
    save("llama", folder / "hf", dtype=torch.float32, num_hidden_layers=1)
    import_hf(folder / "hf", folder / "ours", None, num_workers=1)
    return folder / "ours"


def test_an_export_is_uploaded_once_it_is_proven(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text = call("convert", "export", "--checkpoint", checkpoint, "--out", out, "--push", "org/name")
    assert code == 0, text
    assert f"{out} is uploaded: {hub.address}/org/name/commit/{'c' * 40}" in text
    assert text.index("proven") < text.index("is uploaded")
    assert hub.repositories == {"org/name": True}
    assert hub.files == {path.name: path.read_bytes() for path in out.iterdir()}


def test_a_failed_upload_leaves_the_folder(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.is_full, out = True, tmp_path / "out"
    code, text = call("convert", "export", "--checkpoint", checkpoint, "--out", out, "--push", "org/name")
    assert code == MachineError.exit_code
    assert f"{out} is complete, but was not uploaded" in text
    assert f"run hf upload org/name {out}" in text
    assert (out / "config.json").exists()


def test_an_upload_that_would_fail_is_refused_before_the_export(
    hub: Hub, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses(ConfigError, "org/name"):
        logged_in("name")
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(ConfigError, match="the token is not valid; run hf auth login"):
            logged_in("org/name")
        patch.delenv("HF_TOKEN")
        code, text = call(
            "convert", "export", "--checkpoint", checkpoint, "--out", tmp_path / "a", "--push", "org/name"
        )
        assert code == ConfigError.exit_code
        check_message(text, "hf auth login")
    with monkeypatch.context() as patch:
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(MachineError) as caught:
            logged_in("org/name")
        assert "http://127.0.0.1:9 cannot be reached" in str(caught.value)
    assert not (tmp_path / "a").exists()
    assert hub.repositories == {}
