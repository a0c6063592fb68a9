"""A worker that says its last words and is gone: they count, however late the broker reads them."""

import zmq
from queueing.rig import BOOT_ID, WORKER_ID, body, job_id, settings, sha256_of

from broker.back import Identity
from broker.loop import Loop, now
from broker.machine import Machine
from mtplx import messages as m
from mtplx import wire


def test_the_last_words_of_a_worker_that_is_gone_are_read_before_it_is_lost(tmp_path):
    """The connection may be found broken, by a message for it, while FINAL still lies unread."""
    tmp_path.chmod(0o700)
    given = settings(front=f"ipc://{tmp_path}/f", back=f"ipc://{tmp_path}/b")
    loop = Loop(given, Machine(given, Identity(BOOT_ID, "1", 1, now()), lambda: 1), None)
    loop.bind()
    back, jobs = loop._machine.back, loop._machine.jobs
    context = zmq.Context()
    worker = context.socket(zmq.DEALER)
    try:
        worker.connect(given.endpoint("back"))
        worker.send_multipart(wire.encode(m.Ready(WORKER_ID, 9, "hyper", "h0", "tiny", 1000, 512, {}, 1)))
        assert loop._back.poll(10_000)
        for number in (1, 2):
            loop._machine.on_client(b"a", m.Submit(job_id(number), body()), now())
        loop._turn({loop._back})
        heard = [wire.decode(worker.recv_multipart(), m.TO_WORKER) for _ in range(2)]
        run = heard[1]
        assert isinstance(run, m.Run)
        head = (run.id, run.attempt, run.lease)
        worker.send_multipart(wire.encode(m.WorkerChunk(*head, 0, 1, (5,), "five")))
        end = m.Final(*head, "stop", 3, 0, 16, 0.5, 1.5, sha256_of([5]), "serial_b1", True, {})
        worker.send_multipart(wire.encode(end))
        worker.close(linger=10_000)
        context.term()
        # The turns see no message, only the disconnect; as where the last words come a moment after the look.
        assert loop._monitor.poll(10_000)
        while back.worker is not None:
            loop._turn({loop._monitor})
        first, second = jobs.find(job_id(1)), jobs.find(job_id(2))
        assert (first.last_word.outcome, first.last_word.text) == ("stop", "five")
        assert second.last_word is None
        assert back.last_loss == "exited"
    finally:
        context.destroy(linger=0)
        loop.close()
