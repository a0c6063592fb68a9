"""A program that is told to stop before it serves ends with the exit code of any other stop."""

import os
import signal
import time

import pytest
from whole.harness import Program, environment


@pytest.fixture
def heeded(number):
    """A program leaves a signal alone that whoever starts it ignores, as `nohup` does."""
    before = signal.signal(number, signal.SIG_DFL)
    yield
    signal.signal(number, before)


@pytest.mark.parametrize("module", ["broker", "worker"])
@pytest.mark.usefixtures("hangups_count")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("heeded")
def test_a_stop_while_it_starts_ends_a_program_in_order(module, number, tmp_path):
    pipe = tmp_path / "config.toml"
    os.mkfifo(pipe)
    program = Program(module, "--config", str(pipe), env=environment(HOME=str(tmp_path)))
    try:
        held = writer_of(pipe, program)
        # It waits for its settings, and serves nobody yet.
        program.send(number)
        code = program.ended()
        os.close(held)
        assert (code, program.said()) == (0, "")
    finally:
        program.close()


def writer_of(pipe, program, limit=20.0):
    """The pipe's other end, as soon as the program has opened its own."""
    ends = time.monotonic() + limit
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert program.process.poll() is None, program.said()
            assert time.monotonic() < ends, "the program does not read its settings"
            time.sleep(0.01)
