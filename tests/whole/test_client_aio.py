"""The asyncio client: thin over the same session, so only what differs is tested here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from whole.fake_broker import WORDS, FakeBroker, chunks, done

from mtplx import AsyncClient, BadJobError, BrokerUnreachableError, BusyError, JobError
from mtplx.messages import Bye, Cancel, Error, GiveCredit, Submit

TEXT = "".join(WORDS)


def test_many_jobs_at_once_come_back_whole(broker: FakeBroker) -> None:
    async def main() -> list[str]:
        async with AsyncClient(broker.endpoint) as client:
            results = await asyncio.gather(*(client.run(f"job {n}") for n in range(100)))
            return [result.text for result in results]

    assert asyncio.run(main()) == [TEXT] * 100
    broker.wait_for(Bye)


def test_a_stream_is_iterated_and_asked_for_its_result(broker: FakeBroker) -> None:
    async def main() -> None:
        async with AsyncClient(broker.endpoint) as client:
            stream = await client.submit("Hi")
            assert [piece.text async for piece in stream] == list(WORDS)
            assert (await stream.result()).finish_reason == "stop"
            assert (stream.seed, stream.admit_seq) == (7, 1)
            broker.reply = lambda it, submit: [it.admit(submit), *chunks(submit.id)[:2]]
            stream = await client.submit("Hi", credit=2)
            await anext(stream)
            assert broker.wait_for(GiveCredit).upto_seq == 3

    asyncio.run(main())


def test_it_connects_at_the_first_request_and_answers_status(broker: FakeBroker) -> None:
    async def main() -> None:
        client = AsyncClient(broker.endpoint)
        assert await client.health() == broker.health
        assert await client.status(jobs=True) == {"jobs": []}
        with pytest.raises(JobError, match="No such job"):
            await client.cancel(b"\x01" * 16)
        with pytest.raises(BadJobError):
            await client.submit("")
        await client.close()
        with pytest.raises(BrokerUnreachableError, match="closed"):
            await client.health()

    asyncio.run(main())


def test_giving_up_the_wait_cancels_the_job(broker: FakeBroker) -> None:
    broker.reply = lambda it, submit: [it.admit(submit)]

    async def main() -> None:
        async with AsyncClient(broker.endpoint) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.run("Hi")

    asyncio.run(main())
    broker.wait_for(Cancel)


def test_refusals_limits_and_silence_are_raised(broker: FakeBroker) -> None:
    async def main() -> None:
        async with AsyncClient(broker.endpoint, idle_timeout=0.2) as client:
            broker.reply = lambda _, submit: [
                Error(code="E_DRAINING", message="Stopping.", retryable=True, id=submit.id, retry_after_ms=9)
            ]
            with pytest.raises(BusyError) as caught:
                await client.submit("Hi")
            assert caught.value.retry_after_ms == 9
            broker.reply = lambda it, submit: [it.admit(submit)]
            stream = await client.submit("Hi")
            with pytest.raises(TimeoutError):
                await stream.result(timeout=0.02)
            with pytest.raises(BrokerUnreachableError, match=r"No word for 0\.2 s"):
                await stream.result()
            broker.say(*chunks(stream.id), done(stream.id))
            assert (await stream.result()).text == TEXT

    asyncio.run(main())


def test_no_broker_is_said_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncClient(f"ipc://{tmp_path}/none.sock", timeout=0.2):
            pass

    with pytest.raises(BrokerUnreachableError, match="no such socket file"):
        asyncio.run(main())


def test_a_dropped_client_warns(broker: FakeBroker) -> None:
    async def main() -> None:
        clients = [AsyncClient(broker.endpoint)]
        await clients[0].connect()
        with pytest.warns(ResourceWarning, match="dropped unclosed"):
            clients.clear()

    asyncio.run(main())


def test_one_task_that_gives_up_its_first_request_does_not_end_that_of_another(endpoint: str) -> None:
    async def main() -> None:
        client = AsyncClient(endpoint)
        first, second = (asyncio.create_task(client.health()) for _ in range(2))
        # Both are under way: there is no broker yet.
        await asyncio.wait([first, second], timeout=0.05)
        first.cancel()
        await asyncio.wait([first])
        with FakeBroker(endpoint) as broker:
            assert await second == broker.health
            await client.close()

    asyncio.run(main())


def test_a_connection_that_failed_is_tried_anew_by_the_next_request(endpoint: str) -> None:
    async def main() -> None:
        client = AsyncClient(endpoint, timeout=0.1)
        for _ in range(2):
            with pytest.raises(BrokerUnreachableError, match="no such socket file"):
                await client.connect()
        client.timeout = 10
        with FakeBroker(endpoint) as broker:
            assert (await client.run("Hi")).text == TEXT
            assert await client.health() == broker.health
            await client.close()
        with pytest.raises(BrokerUnreachableError, match="closed"):
            await client.connect()

    asyncio.run(main())


def test_a_given_up_first_request_leaves_nothing_open(endpoint: str) -> None:
    async def main() -> None:
        client = AsyncClient(endpoint)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.health()
        assert client._link is None

    asyncio.run(main())


def test_a_stream_is_cancelled_with_await(broker: FakeBroker) -> None:
    broker.reply = lambda it, submit: [it.admit(submit)]

    async def main() -> None:
        async with AsyncClient(broker.endpoint) as client:
            stream = await client.submit("Hi")
            await stream.cancel()
            assert broker.wait_for(Cancel).id == stream.id

    asyncio.run(main())


def test_a_submit_cancelled_at_its_admission_withdraws_the_job(broker: FakeBroker) -> None:
    # Held back until the submit waits for it: only then does the reader below see the admission first.
    broker.reply = lambda _it, _submit: []

    async def main() -> None:
        async with AsyncClient(broker.endpoint) as client:
            task = asyncio.create_task(client.submit("Hi"))
            turn = client._turn

            def cancel_at_admission() -> None:
                turn()
                if any(state.admitted for state in client._session.streams.values()):
                    task.cancel()

            for descriptor in client._link.fds:
                asyncio.get_running_loop().add_reader(descriptor, cancel_at_admission)
            submit = await asyncio.to_thread(broker.wait_for, Submit)
            broker.say(broker.admit(submit))
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client._session.streams == {}
            await client.health()
            broker.wait_for(Cancel)

    asyncio.run(main())


def test_a_stream_with_credit_that_is_dropped_half_read_is_cancelled(broker: FakeBroker) -> None:
    broker.reply = lambda it, submit: [it.admit(submit), *chunks(submit.id)[:2]]

    async def main() -> None:
        async with AsyncClient(broker.endpoint) as client:
            with pytest.warns(ResourceWarning, match="dropped before its end"):
                await anext(await client.submit("Hi", credit=2))
            await client.health()
            broker.wait_for(Cancel)

    asyncio.run(main())
