"""Programs that are killed in the middle of a stream, and clients that do not notice."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from whole.harness import check_stream, environment, service

from mtplx import AsyncClient, Client, JobError
from mtplx import messages as m

SCRIPT = '{"tokens": %d, "token_s": 0.01}'
WHOLE = "".join(f"{token} " for token in range(120))


def job(tokens: int = 120) -> dict:
    return {"prompt": "go", "max_tokens": 1000, "metadata": {"script": SCRIPT % tokens}}


def restart_broker(broker) -> None:
    broker.broker.send(signal.SIGKILL)
    broker.broker.ended()
    broker.broker = broker.start_broker()


def test_a_client_reads_its_stream_through_a_broker_that_is_killed_and_started_again():
    with service("--beat-s", "0.2", "--dead-s", "2") as broker:
        broker.worker()
        with Client(broker.front) as client:
            stream, waiting = client.submit(job()), client.submit(job(3))
            seen = [next(stream).text for _ in range(20)]
            restart_broker(broker)
            seen += [piece.text for piece in stream]
            assert "".join(seen) == WHOLE
            result = stream.result()
            assert (result.text, result.run["attempt"], result.run["resume_exact"]) == (WHOLE, 2, True)
            assert waiting.result(20).text == "0 1 2 "


def test_it_lives_through_a_broker_and_a_worker_killed_together_and_away_for_a_while():
    with service("--beat-s", "0.2", "--dead-s", "2") as broker:
        worker = broker.worker()
        with Client(broker.front) as client:
            stream = client.submit(job())
            seen = [next(stream).text for _ in range(20)]
            worker.send(signal.SIGKILL)
            broker.broker.send(signal.SIGKILL)
            broker.broker.ended()
            ready = threading.Timer(3.0, broker.start_broker)
            ready.start()
            late = threading.Timer(4.0, broker.worker, kwargs={"accepted": False})
            late.start()
            seen += [piece.text for piece in stream]
            ready.join()
            late.join()
            assert "".join(seen) == WHOLE
            assert stream.result().text == WHOLE


def test_the_asyncio_client_does_so_too():
    async def run(broker) -> str:
        async with AsyncClient(broker.front) as client:
            stream = await client.submit(job())
            seen = [(await anext(stream)).text for _ in range(20)]
            await asyncio.to_thread(restart_broker, broker)
            seen += [piece.text async for piece in stream]
            await stream.result()
            return "".join(seen)

    with service("--beat-s", "0.2", "--dead-s", "2") as broker:
        broker.worker()
        assert asyncio.run(run(broker)) == WHOLE


def test_a_job_that_a_forgetful_broker_lost_before_it_began_is_submitted_again_under_its_id():
    with service("--durability", "none") as broker, Client(broker.front) as client:
        stream = client.submit(job(3))
        restart_broker(broker)
        broker.answers().socket.close()
        broker.worker()
        assert stream.result(20).text == "0 1 2 "


def test_a_job_it_lost_after_it_began_ends_with_a_sentence_that_says_why():
    with service("--durability", "none") as broker:
        broker.worker()
        with Client(broker.front) as client:
            stream = client.submit(job())
            next(stream)
            restart_broker(broker)
            with pytest.raises(JobError, match="started anew") as caught:
                stream.result(20)
            assert caught.value.code == "E_UNKNOWN_JOB"


def test_workers_killed_one_after_the_other_leave_one_stream_without_gap_or_repeat():
    with service() as broker:
        producer = broker.producer()
        long = producer.submit(script={"tokens": 400, "token_s": 0.02})
        for _ in range(3):
            worker = broker.worker()
            producer.expect(m.Started, long)
            for _ in range(3):
                producer.expect(m.Chunk, long)
            worker.send(signal.SIGKILL)
            worker.close()
        broker.worker()
        word = producer.last_word(long)
        assert check_stream(producer, long).text == "".join(f"{token} " for token in range(400))
        assert (word.outcome, word.run["attempt"]) == ("stop", 4)


def test_a_buried_job_is_found_shown_kicked_and_deleted_after_a_restart():
    with service() as broker:
        producer = broker.producer()
        killer = producer.submit(script={"tokens": 5, "fault": "abort", "fault_after": 0}, finish=True)
        for _ in range(2):
            worker = broker.worker()
            worker.wait_for("fault")
            worker.close()
        assert producer.last_word(killer).code == "E_POISON"
        restart_broker(broker)
        broker.answers().socket.close()
        with Client(broker.front) as client:
            listed = client.status(jobs=True, state="buried")["jobs"]
            assert [one["id"] for one in listed] == [killer.hex()]
            assert client.status(killer, whole=True)["job"]["prompt"] == "one two three"
            assert client.kick(killer)["state"] == "waiting"
            for _ in range(2):
                worker = broker.worker()
                worker.wait_for("fault")
                worker.close()
            limit = time.monotonic() + 10
            while client.status(killer)["state"] != "buried":
                assert time.monotonic() < limit
            assert client.delete(killer)["state"] == "deleted"
            assert client.status(jobs=True)["jobs"] == []


def test_buried_jobs_are_seen_and_handled_on_the_command_line():
    def mtplx(*arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "mtplx.cli.main", *arguments]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    with service() as broker:
        producer = broker.producer()
        killer = producer.submit(script={"tokens": 5, "fault": "abort", "fault_after": 0}, prompt="the prompt")
        for _ in range(2):
            worker = broker.worker()
            worker.wait_for("fault")
            worker.close()
        producer.last_word(killer)
        front = ("--front", broker.front)
        assert killer.hex() in mtplx("jobs", "list", "--state", "buried", *front)
        assert killer.hex() not in mtplx("jobs", "list", "--state", "ended", *front)
        listed = mtplx("jobs", *front).splitlines()
        assert listed[0].split()[-1] == "OWNER"
        assert (listed[1].split()[0], listed[1].split()[-1]) == (killer.hex(), f"uid:{os.getuid()}")
        shown = mtplx("jobs", "show", killer.hex()[:8], *front)
        assert "the prompt" in shown
        assert "E_POISON" in shown
        assert mtplx("jobs", *front, "kick", killer.hex()).split() == [killer.hex(), "waiting"]
        mtplx("cancel", killer.hex(), *front)
        assert mtplx("jobs", "delete", killer.hex(), *front).split() == [killer.hex(), "deleted"]
        assert killer.hex() not in mtplx("jobs", *front)
        assert "the prompt" not in broker.broker.said()
