"""Who may hold the endpoints, what is refused before anything is bound, and peers that come back."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq
from whole.harness import ROOT, Producer, check_stream, environment, service

from mtplx import messages as m


def run_broker(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Start a broker that is expected to refuse at once."""
    command = [sys.executable, "-P", "-m", "broker", *flags]
    return subprocess.run(
        command, env=env or environment(), capture_output=True, text=True, timeout=20, cwd=ROOT, check=False
    )


def test_a_second_broker_on_the_same_path_exits_and_the_first_goes_on():
    with service() as broker:
        second = broker.start_broker()
        assert second.ended() == 4
        assert f"({broker.broker.pid})" in second.said()
        broker.answers().socket.close()


def test_after_kill_9_the_next_broker_takes_the_path_at_once():
    with service() as broker:
        broker.broker.send(signal.SIGKILL)
        broker.broker.ended()
        assert (broker.run / "front.sock").exists()
        broker.start_broker()
        broker.worker()
        producer = broker.answers()
        assert producer.last_word(producer.submit(script={"tokens": 2})).outcome == "stop"


def test_a_broker_whose_folder_was_deleted_leaves_the_sockets_of_its_successor_alone():
    with service() as broker:
        first = broker.broker
        shutil.rmtree(broker.run)
        broker.run.mkdir(0o700)
        broker.start_broker()
        broker.answers().socket.close()
        first.send(signal.SIGTERM)
        assert first.ended() == 0
        assert (broker.run / "back.sock").is_socket()
        broker.worker()
        producer = broker.answers()
        assert producer.last_word(producer.submit(script={"tokens": 2})).outcome == "stop"


def test_a_file_of_somebody_else_at_the_path_is_refused_and_left_alone(tmp_path):
    run = Path(os.path.realpath(tmp_path))
    run.chmod(0o700)
    foreign = run / "front.sock"
    foreign.write_text("precious")
    refused = run_broker("--run-dir", str(run), "--back", f"ipc://{run}/b.sock")
    assert refused.returncode == 2
    assert f"{foreign} exists and is no socket of yours" in refused.stderr
    assert foreign.read_text() == "precious"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
@pytest.mark.parametrize("given", ["front.sock", "."])
def test_a_socket_or_a_folder_of_another_user_is_refused_and_left_alone(tmp_path, given):
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(tmp_path / "front.sock"))
    os.chown(tmp_path / given, 65534, 65534)
    refused = run_broker("--run-dir", str(tmp_path), "--state-dir", str(tmp_path.with_name("state")))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert (tmp_path / "front.sock").is_socket()


@pytest.mark.parametrize("make", ["link", "folder"])
def test_a_lock_that_is_no_plain_file_is_refused_in_a_sentence(tmp_path, make):
    tmp_path.chmod(0o700)
    lock = tmp_path / "front.sock.lock"
    if make == "link":
        lock.symlink_to(tmp_path / "elsewhere")
    else:
        lock.mkdir()
    refused = run_broker("--run-dir", str(tmp_path))
    assert (refused.returncode, "front.sock.lock" in refused.stderr) == (2, True)
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "elsewhere").exists()


def test_a_start_on_a_full_disk_is_refused_in_a_sentence_and_leaves_nothing_in_the_way(tmp_path):
    """A limit of no bytes for files stands for the disk: the first write of each fails."""
    lowered = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
        "runpy.run_module('broker', run_name='__main__')"
    )
    run = tmp_path / "r"
    command = [sys.executable, "-c", lowered, "--run-dir", str(run)]
    refused = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=20, cwd=ROOT, check=False
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (7, 1), refused.stderr
    assert "make room" in refused.stderr
    with service(run=run) as broker:
        broker.answers().socket.close()


def test_a_path_that_is_no_text_is_refused_in_a_sentence(tmp_path):
    refused = run_broker("--run-dir", os.fsdecode(bytes(tmp_path) + b"/\xff"))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "--run-dir" in refused.stderr


def test_a_path_too_long_for_a_socket_is_refused_with_both_lengths(tmp_path):
    run = tmp_path / ("x" * 100)
    refused = run_broker("--run-dir", str(run))
    assert refused.returncode == 2
    assert "103" in refused.stderr
    assert "--run-dir" in refused.stderr
    assert not run.exists()


def test_the_folder_is_made_private_and_one_open_to_others_is_refused(tmp_path):
    with service(run=tmp_path / "run") as broker:
        assert stat.S_IMODE(broker.run.stat().st_mode) == 0o700
        assert stat.S_IMODE((broker.run / "front.sock").stat().st_mode) & 0o077 == 0
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o755)
    refused = run_broker("--run-dir", str(open_folder))
    assert refused.returncode == 2
    assert "choose a folder of your own" in refused.stderr


def test_a_client_that_comes_back_on_a_new_connection_takes_its_stream_up_where_it_was():
    with service() as broker:
        broker.worker()
        first = broker.producer()
        job = first.submit(script={"tokens": 200, "token_s": 0.005})
        chunk = first.expect(m.Chunk, job)
        first.drain()
        chunks = [one for one in first.about(job) if isinstance(one, m.Chunk)]
        first.socket.close()
        second = broker.producer()
        second.log += first.log
        second.say(m.Resume(job, len(chunks), sum(one.n for one in chunks)))
        assert second.last_word(job).outcome == "stop"
        assert check_stream(second, job).usage["completion_tokens"] == 200
        assert chunk.seq == 0


def test_a_client_that_always_submits_twice_gets_each_job_run_once():
    with service() as broker:
        worker = broker.worker()
        producer = broker.producer()
        jobs = []
        for _ in range(20):
            job = producer.submit(script={"tokens": 2})
            producer.submit(job, script={"tokens": 2})
            jobs.append(job)
        for job in jobs:
            producer.last_word(job)
        producer.health()
        worker.wait_for("final", 20)
        assert len(worker.events("run")) == 20


# --- what hyper refuses at start, before it binds anything

REFUSED = [
    (("--max-active-requests", "2"), ("--max-active-requests 2", "one request")),
    (("--decode-batch-max", "4"), ("--decode-batch-max 4", "one request")),
    (("--batch-wait-ms", "5"), ("--batch-wait-ms 5", "no gather window")),
    (("--batching-preset", "agent"), ("--batching-preset agent", "batches several")),
    (("--batching-preset", "throughput"), ("--batching-preset throughput", "batches several")),
    (("--scheduler-mode", "batched"), ("scheduler-mode", "serial, hyper")),
    (("--front", "tcp://0.0.0.0:5555"), ("--front tcp://0.0.0.0:5555", "leaves this machine")),
    (("--front", "tcp://127.0.0.1:0"), ("--front tcp://127.0.0.1:0", "no port")),
    (("--front", "ipc:///tmp/mx-one.sock", "--back", "ipc:///tmp/./mx-one.sock"), ("--front", "one endpoint")),
    (("--front", "tcp://127.0.0.1:5999", "--back", "tcp://localhost:5999"), ("--back", "one endpoint")),
    (("--retain-bytes", str(2**60)), ("--retain-bytes", "must be from")),
    (("--beat-s", "6"), ("--dead-s", "--beat-s")),
    (("--queue-jobs", "0"), ("--queue-jobs", "from 1")),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[" ".join(flags) for flags, _ in REFUSED])
def test_a_setting_that_cannot_be_is_refused_with_exit_code_2_and_a_sentence(tmp_path, flags, words):
    refused = run_broker("--run-dir", str(tmp_path / "r"), *flags)
    assert refused.returncode == 2, refused.stderr
    for word in words:
        assert word in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_an_unknown_variable_is_refused_and_a_known_one_counts(tmp_path):
    run = ("--run-dir", str(tmp_path / "r"))
    assert run_broker(*run, env=environment(MTPLX_SPEED="9")).returncode == 2
    refused = run_broker(*run, env=environment(MTPLX_MAX_ACTIVE_REQUESTS="3"))
    assert (refused.returncode, "refused in hyper mode" in refused.stderr) == (2, True)


def test_in_serial_mode_the_same_flags_are_taken_with_one_warning():
    flags = ("--scheduler-mode", "serial", "--max-active-requests", "4", "--batching-preset", "agent")
    with service(*flags) as broker:
        assert broker.answers().health()["scheduler"] == {"mode": "serial"}
        assert broker.broker.said().count("No effect in serial mode") == 1


def test_more_connections_than_the_soft_limit_of_files_do_not_abort_the_broker():
    """libzmq aborts the process where it can open no more files; macOS starts with 256."""
    lowered = (
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "sys.argv[0] = 'broker'\n"
        "runpy.run_module('broker', run_name='__main__')\n"
    )
    folder = Path(tempfile.mkdtemp(prefix="mx", dir="/tmp"))
    command = [sys.executable, "-c", lowered, "--run-dir", str(folder)]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    context = zmq.Context()
    try:
        producers = [Producer(context, f"ipc://{folder}/front.sock") for _ in range(150)]
        for producer in producers:
            producer.say(m.Ping(1))
        assert all(producer.hear().n == 1 for producer in producers)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        context.destroy(linger=0)
        shutil.rmtree(folder, ignore_errors=True)
