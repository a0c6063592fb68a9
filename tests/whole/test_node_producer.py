"""A producer in another language, written from docs/protocol.md alone, gets its answers from the real broker."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tools import need
from whole.harness import service

from mtplx.job import Job
from mtplx.testing import Script, answer_of, trajectory_sha256

NODE = Path(__file__).parents[1] / "protocol" / "node"


@pytest.fixture(scope="module")
def producer():
    """Path of the program, its packages installed; they stay for the next run."""
    need("node")
    npm = need("npm")
    installed = NODE / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < (NODE / "package-lock.json").stat().st_mtime:
        # zeromq brings its binaries along: no install script has to run.
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        result = subprocess.run(command, cwd=NODE, check=False, capture_output=True, text=True, timeout=300)
        if result.returncode and not os.environ.get("REQUIRE_TOOLS"):
            pytest.skip(f"npm could not install the packages: {result.stderr[-300:]}")
        assert result.returncode == 0, result.stderr
    return NODE / "producer.mjs"


def test_a_producer_in_node_submits_streams_and_cancels(producer):
    with service() as running:
        worker = running.worker()
        result = subprocess.run(
            [need("node"), str(producer), running.front], check=False, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
    said = {line["said"]: line for line in map(json.loads, result.stdout.splitlines())}

    assert said["welcome"]["version"] == 1
    assert said["welcome"]["limits"]["max_job_bytes"] == 1024**2
    streamed = said["streamed"]
    ids, texts = answer_of(Job(prompt="the sky is blue"), Script(), 1000)
    assert (streamed["outcome"], streamed["text"], streamed["tokens"]) == ("stop", "".join(texts), 4)
    assert streamed["sha256"] == trajectory_sha256(ids)
    assert streamed["admitted_seed"] == streamed["done_seed"] == str(2**64 - 1)
    assert said["cancelled"]["outcome"] == "cancelled"
    assert 3 <= said["cancelled"]["tokens"] < 1000
    assert said["refused"] == {"said": "refused", "code": "E_BAD_JOB", "field": "max_tokens", "retryable": False}
    assert len(worker.wait_for("run", 2)) == 2


def test_the_node_packages_are_pinned_and_name_no_registry():
    package = json.loads((NODE / "package.json").read_text())
    lock = json.loads((NODE / "package-lock.json").read_text())
    assert package["dependencies"] == lock["packages"][""]["dependencies"]
    assert all(version[0].isdigit() for version in package["dependencies"].values())
    assert all(
        "resolved" not in entry and "integrity" in entry for name, entry in lock["packages"].items() if name
    )
    assert len((NODE / "producer.mjs").read_text().splitlines()) <= 130
