"""`mtplx inspect OWNER/NAME`: a checkpoint on the hub is looked at without fetching its weights.

The hub is a server of the test's own on loopback, which counts what it gives away.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from speculating.mtp_checkpoints import checkpoint
from whole.harness import environment

from mtplx.errors import ModelFilesError
from worker import inspect
from worker.speculation.mtp.survey import Checkpoint

REPO, COMMIT = "makers/tiny-mimo", "0" * 40
LIMIT_S = 60.0
# What the library asks for at first, in the hope that it holds the header.
HEADER_REQUEST = 100_001


@dataclass
class Hub:
    """folder: of the one checkpoint. fails: status of every answer, where it is not 0."""

    folder: Path
    fails: int = 0
    url: str = ""
    given: dict[str, int] = field(default_factory=dict)

    def answer(self, path: str, wanted: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a request; wanted: its range."""
        if self.fails:
            return self.fails, {"X-Error-Message": "it is not for you"}, b""
        if path.startswith(f"/api/models/{REPO}/tree/"):
            files = [
                {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": COMMIT}
                for one in sorted(self.folder.iterdir())
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(files).encode()
        file = self.folder / path.rpartition("/")[2]
        if not path.startswith(f"/{REPO}/resolve/") or not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        body, status = file.read_bytes(), 200
        if wanted is not None:
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            body, status = body[first : last + 1], 206
        return status, {"X-Repo-Commit": COMMIT, "ETag": f'"{file.name}"'}, body


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "model").mkdir()
    checkpoint(tmp_path / "model", "mimo")
    told = Hub(tmp_path / "model")

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            status, headers, body = told.answer(path, self.headers["Range"])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                told.given[path] = told.given.get(path, 0) + len(body)
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the library's name

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    told.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield told
    server.shutdown()
    server.server_close()
    thread.join(LIMIT_S)


def look(hub: Hub, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`python -m worker.inspect`, for huggingface_hub reads its settings when it is imported."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "worker.inspect", "--json", REPO],
        env=environment(HF_ENDPOINT=hub.url, HF_HOME=str(home), MTPLX_CONFIG="/dev/null", **more),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def padded(file: Path, count: int) -> None:
    """Make the weights *count* bytes longer, behind what their header tells of."""
    with file.open("ab") as stream:
        stream.write(bytes(count))


def test_it_is_told_as_a_folder_would_be_and_weights_stay_where_they_are(hub: Hub, tmp_path: Path) -> None:
    folder = inspect.report(Checkpoint.at(hub.folder))
    padded(hub.folder / "model.safetensors", 1_000_000)
    done = look(hub, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {**folder, "model": REPO}
    resolved = {path.rpartition("/")[2]: size for path, size in hub.given.items() if "/resolve/" in path}
    assert resolved.keys() == {"config.json", "model.safetensors"}
    assert resolved["model.safetensors"] <= HEADER_REQUEST


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_the_hub_refuses_is_told_in_a_sentence(hub: Hub, tmp_path: Path, status: int) -> None:
    hub.fails = status
    done = look(hub, tmp_path / "home")
    assert done.returncode == ModelFilesError.exit_code, done.stderr
    assert done.stderr.startswith(f"mtplx-inspect: {REPO} cannot be fetched from Hugging Face (")
    assert "Check the name and the network" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_network_a_damaged_header_and_no_weights_are_told_in_a_sentence(hub: Hub, tmp_path: Path) -> None:
    done = look(hub, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert "cannot be fetched from Hugging Face" in done.stderr
    weights = hub.folder / "model.safetensors"
    weights.write_bytes(b"\xff" * 300)
    done = look(hub, tmp_path / "home")
    assert "model.safetensors of makers/tiny-mimo is no whole safetensors file" in done.stderr
    weights.unlink()
    done = look(hub, tmp_path / "home")
    assert "holds no safetensors files" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "header",
    [b"[1]", b'{"a": [1]}', b'{"a": {"dtype": "F32", "shape": null, "data_offsets": [0, 4]}}',
     b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}'],
)  # fmt: skip
def test_headers_that_no_file_should_have_are_told_in_a_sentence(hub: Hub, tmp_path: Path, header: bytes) -> None:
    (hub.folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    done = look(hub, tmp_path / "home")
    assert done.returncode == ModelFilesError.exit_code, done.stderr
    assert "is no whole safetensors file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": None}, "names no model_type"),
        ({"model_file": "own.py"}, "wants to run its own code"),
        (None, "has no config.json"),
    ],
)
def test_a_config_that_a_folder_is_refused_for_is_refused_here(
    hub: Hub, tmp_path: Path, config: dict | None, words: str
) -> None:
    file = hub.folder / "config.json"
    if config is None:
        file.unlink()
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    done = look(hub, tmp_path / "home")
    assert (done.returncode, words in done.stderr) == (ModelFilesError.exit_code, True), done.stderr


def test_a_whole_copy_that_was_fetched_before_is_looked_at_though_the_hub_has_a_later_one(
    hub: Hub, tmp_path: Path
) -> None:
    copy = tmp_path / "home" / "hub" / f"models--{REPO.replace('/', '--')}"
    shutil.copytree(hub.folder, copy / "snapshots" / ("1" * 40))
    (copy / "refs").mkdir()
    (copy / "refs" / "main").write_text("1" * 40)
    done = look(hub, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == REPO
    assert not any("/resolve/" in path for path in hub.given)
