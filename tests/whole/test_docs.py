"""Whoever types what the documents say gets what they say: each command of each page is run.

Commands run in order, a page in a home folder of its own, beside a service with the worker double. A new page is found
by itself; a command that cannot run here is named in NOT_RUN with its reason.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import click
import pytest
from deploy_files import managers
from whole.harness import ROOT

from broker.__main__ import main as broker
from mtplx import Client
from mtplx.cli.main import main
from mtplx.settings import Settings
from worker.__main__ import main as worker

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LIMIT_S = 60.0
# What begins a command that is not run, and why.
NOT_RUN = {
    "make ": "sets up the environment in which this test runs, or runs this test",
    "pip install": "installs packages over the network",
    "git clone": "fetches this repository over the network",
    "mtplx pull": "fetches a model over the network; tests/inference/test_pull.py runs it against a stand-in",
    "mtplx demo": "fetches a model over the network",
    "mtplx probe": "measures a model, which tests/whole/test_cli_probe.py does with a tiny one",
    "mtplx inspect": "reads a large model, which tests/speculating/test_mtp_inspect.py does with small ones",
    "mtplx forge": "trains a head, which tests/forging/test_forge_command.py does with a tiny model",
    "launchctl ": "is there on macOS alone",
    "newsyslog ": "is there on macOS alone",
    "loginctl ": "asks the system's own manager of logins",
    "journalctl ": "reads the logs of a running systemd",
    "docker ": "fetches and runs images",
    "otelcol": "is a program of others, checked by tests of its settings file",
    "python docs/make_pictures.py": "draws pictures with a browser",
}
# What finds something here that is as it should not be: its exit code, and words of the finding.
FINDS = {"mtplx doctor": (1, "mtplx pull smollm2-135m")}
# What runs until it is told to stop.
FOREGROUND = ("mtplx serve", "mtplx-broker", "mtplx-worker", "mtplx top")


class Page:
    """A home folder, programs on the PATH, and a service that answers."""

    def __init__(self, path: Path) -> None:
        self.home = path
        self.folder = path / "work"
        tools = path / "bin"
        for folder in (self.folder, tools):
            folder.mkdir()
        for name in ("mtplx", "mtplx-broker", "mtplx-worker"):
            program = ROOT / "tests" / "whole" / "docs_programs.py"
            (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" {name} "$@"\n')
            (tools / name).chmod(0o755)
        managers.put(tools)
        for name in ("python", "python3"):
            (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            (tools / name).chmod(0o755)
        (self.folder / "question.txt").write_text("one two three")
        (self.folder / "jobs.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MTPLX_", "OTEL_", "XDG_"))}
        self.env = {**kept, "HOME": str(path), "PATH": f"{tools}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        self.before: list[str] = []
        self.serving: subprocess.Popen[str] | None = None
        self.front = f"ipc://{path}/.mtplx/run/front.sock"
        self.ports: dict[str, int] = {}
        self.traced = ""

    def run(self, command: str) -> None:
        """Run one command of a page, as it stands there but for what is `replaced`."""
        told = self.replaced(command)
        if told.startswith("mtplx serve"):
            self.serve(told)
        elif told.startswith(FOREGROUND):
            self.for_a_while(told)
        elif told.startswith(("cd ", "export ")):
            self.before.append(told)
        else:
            self.need_service()
            done = subprocess.run(
                ["/bin/sh", "-ec", "\n".join([*self.before, told])],
                env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
            code, words = next((find for start, find in FINDS.items() if told.startswith(start)), (0, ""))
            assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
            assert words in done.stdout

    def replaced(self, command: str) -> str:
        """*command* with ports that are free here, on loopback alone, and ids and keys that there are."""
        if command.startswith("mtplx trace"):
            command = command.replace("3f9a", self.traced_job())
        if "3f9a" in command:
            command = command.replace("3f9a", self.running_job())
        if "PUBLIC-KEY-OF-LAPTOP" in command:
            key = re.search(r'public-key = "(.*)"', (self.home / ".mtplx/state/keys/laptop.key").read_text())
            command = command.replace("PUBLIC-KEY-OF-LAPTOP", key[1])
        return re.sub(r"(127\.0\.0\.1|0\.0\.0\.0|localhost):(\d+)", self._port, command)

    def _port(self, found: re.Match[str]) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{self.ports.setdefault(found[2], free.getsockname()[1])}"

    def running_job(self) -> str:
        """The beginning of the id of a job that runs for long."""
        self.need_service()
        with Client(self.front, timeout=LIMIT_S) as client:
            script = json.dumps({"tokens": 100_000, "token_s": 0.05})
            stream = client.submit("x", max_tokens=100_000, finish=True, metadata={"script": script})
            next(iter(stream))
            return stream.id.hex()[:6]

    def traced_job(self) -> str:
        """The beginning of the id of a job whose spans are in spans.jsonl."""
        if not self.traced:
            self.serve("mtplx serve --trace-file spans.jsonl")
            with Client(self.front, timeout=LIMIT_S) as client:
                stream = client.submit("one two three")
                stream.result(timeout=LIMIT_S)
            self.traced = stream.id.hex()[:6]
            self.stop()
        return self.traced

    def need_service(self) -> None:
        """A service that answers, where none was started yet."""
        if self.serving is None:
            self.serve(f"mtplx serve {self.replaced('--http 127.0.0.1:8000') if 'http' in known(main) else ''}")

    def serve(self, command: str) -> None:
        """Start the service of *command* in the place of the one before it, and wait until it is ready."""
        self.stop()
        self.serving = subprocess.Popen(
            ["/bin/sh", "-ec", "\n".join([*self.before, f"exec {command}"])],
            env=self.env, cwd=self.folder, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        said = []
        for line in self.serving.stderr:
            said.append(line)
            if "worker is ready" in line:
                return
        raise AssertionError(f"{command}\n{''.join(said)}")

    def for_a_while(self, command: str) -> None:
        """Start *command*, interrupt it when it has said something, and expect a good end."""
        self.need_service()
        running = subprocess.Popen(
            ["/bin/sh", "-ec", f"exec {command}"],
            env=self.env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        first = running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        rest = running.communicate(timeout=LIMIT_S)[0]
        assert running.returncode in (0, 130, -signal.SIGINT), f"{command}\n{first}{rest}"

    def stop(self) -> None:
        """End the service."""
        if self.serving is not None:
            self.serving.send_signal(signal.SIGINT)
            self.serving.communicate(timeout=LIMIT_S)
            assert self.serving.returncode == 0
            self.serving = None


@pytest.fixture
def page() -> Iterator[Page]:
    # Short: there are sockets in it.
    folder = Path(tempfile.mkdtemp(prefix="mx", dir="/tmp"))
    found = Page(folder)
    try:
        yield found
        found.stop()
    finally:
        if found.serving is not None:
            found.serving.kill()
            found.serving.wait()
        rmtree(folder)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of *languages*, without what indents them."""
    found = re.findall(r"^( *)```(\w+)\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [
        re.sub(f"^{indent}", "", text, flags=re.MULTILINE) for indent, name, text in found if name in languages
    ]


def commands(page: Path) -> list[str]:
    """The commands of a page, one for each line that continues none."""
    lines = "\n".join(blocks(page, "sh", "bash", "shell", "console")).replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if line.strip() and not line.strip().startswith("#")]


def reason_not_to_run(command: str) -> str:
    """Why it is not run, if so."""
    plain = re.sub(r"^(sudo |\.venv/bin/)+", "", command)
    return next((reason for beginning, reason in NOT_RUN.items() if plain.startswith(beginning)), "")


def known(command: click.Command) -> set[str]:
    """The names of a command's options, also of those that may stand before it."""
    return {name.lstrip("-") for one in (command, main) for option in one.params for name in option.opts} | {
        "help"
    }


def wrong_in(words: list[str]) -> str | None:
    """The word of a command line that its program does not know; None where it knows all."""
    program: click.Command = {"mtplx": main, "mtplx-broker": broker, "mtplx-worker": worker}[words[0]]
    for word in words[1:]:
        if word.startswith("-") and len(word) > 1:
            if word.partition("=")[0].lstrip("-") not in known(program):
                return word
        elif isinstance(program, click.Group):
            # A word in capitals stands for one of several; after it nothing is known.
            if word.isupper() or "..." in word:
                return None
            if word not in program.commands:
                # The value of a setting that stands before the command.
                if words[words.index(word) - 1].startswith("--"):
                    continue
                return word
            program = program.commands[word]
    return None


@pytest.mark.parametrize("path", [one for one in PAGES if commands(one)], ids=lambda one: one.name)
def test_every_command_of_a_page_runs(page: Page, path: Path) -> None:
    for command in commands(path):
        if not reason_not_to_run(command):
            page.run(command.removeprefix(".venv/bin/"))


@pytest.mark.parametrize("path", [one for one in PAGES if blocks(one, "python")], ids=lambda one: one.name)
def test_every_program_of_a_page_runs(page: Page, path: Path) -> None:
    for text in blocks(path, "python"):
        (page.folder / "program.py").write_text(text)
        page.run("python program.py")


@pytest.mark.parametrize("path", PAGES, ids=lambda one: one.name)
def test_every_command_named_in_a_sentence_is_known_with_all_its_options(path: Path) -> None:
    text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = [one.split() for one in re.findall(r"`(mtplx(?:-broker|-worker)? [^`]+)`", text)]
    assert [(" ".join(words), wrong_in(words)) for words in named if wrong_in(words)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda one: one.name)
def test_every_settings_file_of_a_page_is_one(path: Path, tmp_path: Path) -> None:
    for text in blocks(path, "toml"):
        file = tmp_path / "config.toml"
        file.write_text(text)
        assert Settings.load(environ={}, config=file)
        assert tomllib.loads(text)


@pytest.mark.parametrize("path", PAGES, ids=lambda one: one.name)
def test_every_link_of_a_page_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_a_command_that_fails_and_one_that_nobody_knows_are_found(page: Page) -> None:
    with pytest.raises(AssertionError, match="no such command"):
        page.run("echo 'no such command'; mtplx runn x")
    assert wrong_in(["mtplx", "health", "--jsn"]) == "--jsn"
    assert wrong_in(["mtplx", "helth"]) == "helth"
    assert wrong_in(["mtplx", "--scheduler-mode", "hyper", "jobs", "list", "--state", "buried"]) is None


@pytest.mark.parametrize("name", ["settings.md", "operate.md", "troubleshooting.md"])
def test_the_tables_are_what_the_generator_gives(name: str) -> None:
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs" / "make_settings.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    page = (ROOT / "docs" / name).read_text()
    assert maker.filled(name, page) == page, "run: python docs/make_settings.py"
