"""Wounded frames against a live broker while a job streams: who gets an answer, and what stays untouched."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgpack
import zmq
from protocol import make_vectors
from whole.harness import Producer, Service, rss_kib

from mtplx import messages as m
from mtplx import wire
from mtplx.errors import ProtocolError
from mtplx.job import Job
from mtplx.testing import trajectory_sha256

VALID = [
    make_vectors.frames_of(vector)
    for vector in [*make_vectors.valid_messages(), *make_vectors.unknown_keys()]
    if vector["socket"] == "from_client"
]
STRANGE = [
    None, True, -1, 2**64 - 1, 1.5, float("nan"), "x", "", b"", bytes(16), [], {}, [[]], {"a": {"b": []}}, [1] * 300,
    "x" * 300, msgpack.ExtType(5, b"x"), msgpack.Timestamp(0), [msgpack.Timestamp(1)],
]  # fmt: skip
BOMBS = [
    b"\x91" * 3000,
    b"\x81\xa1k" * 3000,
    b"\xdd\xff\xff\xff\xff" * 100,
    b"\xdf\xff\xff\xff\xff\xa1k",
    b"\x81\xa1k\xdb\xff\xff\xff\xff",
    b"\x81\xa1k\xc6\x7f\xff\xff\xff",
    b"\x81\xa1k\xc5\xff\xff" + bytes(70_000),
    b"\x81\xa1k\xdc\xff\xff" + b"\xc0" * 65535,
]
EXTREMES = (0, 1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64 - 1)
# A job of the attacker's own, which has ended.
ENDED = b"ended before all"
ABOUT_A_JOB = tuple(bytes([kind.KIND]) for kind in (m.Resume, m.GiveCredit, m.Cancel, m.Kick))
# A body above the limit of a job; rare, since sending them takes all the time.
LARGE = bytes(1024**2 + 1)
# Messages that may stay unanswered: they say something of a job, or goodbye.
ANSWERED = (m.Hello, m.Submit, m.Status, m.Kick, m.Delete, m.Ping)
# Answers that may be on their way at once; far below what makes a producer a flooder.
WINDOW = 64
STREAM_TOKEN_S = 0.004

# Where the numbers of our own PINGs begin, so that no wounded PING looks like one.
MARK = 0x6D61_726B << 24

Frames = list[bytes]


def flip(draw: random.Random, frames: Frames) -> None:
    """Change single bits."""
    place = draw.randrange(len(frames))
    frame = bytearray(frames[place])
    for _ in range(draw.choice((1, 1, 2, 8)) if frame else 0):
        frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
    frames[place] = bytes(frame)


def cut(draw: random.Random, frames: Frames) -> None:
    """Lose the end of a frame."""
    place = draw.randrange(len(frames))
    frames[place] = frames[place][: draw.randint(0, len(frames[place]))]


def splice(draw: random.Random, frames: Frames) -> None:
    """Go on with the end of another message's frame."""
    place, other = draw.randrange(len(frames)), draw.choice(draw.choice(VALID))
    frames[place] = frames[place][: draw.randint(0, len(frames[place]))] + other[draw.randint(0, len(other)) :]


def stuff(draw: random.Random, frames: Frames) -> None:
    """Put random bytes somewhere."""
    place = draw.randrange(len(frames))
    at = draw.randint(0, len(frames[place]))
    frames[place] = frames[place][:at] + draw.randbytes(draw.choice((1, 2, 9))) + frames[place][at:]


def recount(draw: random.Random, frames: Frames) -> None:
    """Change the number or order of frames."""
    place = draw.randrange(len(frames))
    match draw.randrange(4):
        case 0:
            frames.insert(place, frames[place])
        case 1 if len(frames) > 1:
            del frames[place]
        case 2:
            frames.insert(draw.choice((0, place, len(frames))), b"")
        case _:
            draw.shuffle(frames)


def rename(draw: random.Random, frames: Frames) -> None:
    """Another version or kind."""
    if draw.random() < 0.3:
        frames[0] = frames[0][:3] + draw.randbytes(1)
    elif len(frames) > 1:
        frames[1] = draw.randbytes(1)


def retype(draw: random.Random, frames: Frames) -> None:
    """A value of a strange type under a known key, in a map that is sound otherwise."""
    place = draw.randrange(2, len(frames)) if len(frames) > 2 else 0
    values = _map_in(frames[place])
    values[draw.choice([*values, "of_later"])] = draw.choice(STRANGE)
    frames[place] = msgpack.packb(values)


def double(draw: random.Random, frames: Frames) -> None:
    """A key that stands twice."""
    place = draw.randrange(2, len(frames)) if len(frames) > 2 else 0
    values = list(_map_in(frames[place]).items()) or [("k", 1)]
    values = [*values, draw.choice(values)]
    pairs = b"".join(msgpack.packb(key) + msgpack.packb(value) for key, value in values)
    frames[place] = b"\xde" + len(values).to_bytes(2, "big") + pairs


def bomb(draw: random.Random, frames: Frames) -> None:
    """Sizes and depths that promise more than there is."""
    frames[draw.randrange(len(frames))] = LARGE if draw.random() < 0.01 else draw.choice(BOMBS)


def extreme(draw: random.Random, frames: Frames) -> None:
    """Numbers at the edges, in messages about a job that ended and can be taken up again."""
    if len(frames) < 3:
        return
    values = {
        name: draw.choice(EXTREMES) if type(value) is int else value for name, value in _map_in(frames[2]).items()
    }
    if frames[1][:1] in ABOUT_A_JOB:
        values["id"] = ENDED
    frames[2] = msgpack.packb(values)


WOUNDS: list[Callable[[random.Random, Frames], None]] = [
    flip, flip, cut, splice, stuff, recount, rename, retype, retype, double, bomb, extreme,
]  # fmt: skip


def _map_in(frame: bytes) -> dict[str, object]:
    try:
        value = msgpack.unpackb(frame, strict_map_key=False)
    except (TypeError, ValueError, msgpack.exceptions.UnpackException):
        return {}
    return value if type(value) is dict else {}


def wounded(draw: random.Random, valid: list[Frames] = VALID) -> Frames:
    """One of the *valid* messages with one to three wounds."""
    frames = list(draw.choice(valid))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        draw.choice(WOUNDS)(draw, frames)
    return frames


@dataclass(slots=True)
class Stream:
    """A job being read, held to the rules of order."""

    producer: Producer
    id: bytes
    seq: int = 0
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    last: m.Message | None = None

    def take(self) -> None:
        """Read what is there."""
        while self.last is None and self.producer.socket.poll(0):
            message = self.producer.hear(0)
            if isinstance(message, m.Chunk):
                assert (message.seq, message.first, message.n) == (self.seq, len(self.ids), len(message.ids))
                self.seq += 1
                self.ids += message.ids
                self.text.append(message.text)
            elif isinstance(message, m.Done | m.Error):
                self.last = message

    def finish(self) -> m.Done:
        """Cancel the job and read it to its last word."""
        self.producer.say(m.Cancel(self.id))
        while self.last is None:
            assert self.producer.socket.poll(20_000), "no last word"
            self.take()
        assert isinstance(self.last, m.Done), self.last
        assert (self.last.seq, self.last.outcome) == (self.seq, "cancelled")
        assert self.last.sha256 == trajectory_sha256(tuple(self.ids))
        assert self.last.text == "".join(self.text)
        return self.last


@dataclass(slots=True)
class Tally:
    """What was sent and what came back, by the number of the PING that follows each message."""

    sent: int = 0
    bad: int = 0
    foreign: int = 0
    with_delimiter: int = 0
    delimiter_answers: int = 0
    expected: dict[int, str] = field(default_factory=dict)
    answers: int = 0
    ponged: int = -1
    unanswered: list[str] = field(default_factory=list)

    def expect(self, number: int, frames: Frames) -> bool:
        """Note what must come back for *frames*; False where they must not be sent."""
        if not frames[0]:
            self.with_delimiter += 1
            self.bad += 1
            return True
        try:
            message = wire.decode(frames, m.FROM_CLIENT)
        except ProtocolError as error:
            if wire.speaks_mtx(frames):
                self.bad += 1
                self.expected[number] = f"{error} {[frame[:80].hex() for frame in frames]}"
            else:
                self.foreign += 1
            return True
        if isinstance(message, ANSWERED):
            self.expected[number] = repr(message)[:200]
        # BYE throws away what was not yet said to this connection, the answers we count.
        return not isinstance(message, m.Bye)

    def take(self, frames: Frames) -> None:
        """Count one answer."""
        if not frames[0]:
            self.delimiter_answers += 1
            return
        message = wire.decode(frames, m.TO_CLIENT)
        if message == m.Pong(MARK + self.ponged + 1):
            self.ponged += 1
            told = self.expected.pop(self.ponged, None)
            if told is not None and not self.answers:
                self.unanswered.append(told)
            self.answers = 0
        elif not isinstance(message, m.Progress):
            self.answers += 1


@dataclass(frozen=True, slots=True)
class Report:
    """What a run has shown."""

    tally: Tally
    stream_tokens: int
    seconds: float
    rss_before: int
    rss_after: int
    status: dict[str, object]


def attack(running: Service, count: int, seed: int, warm_up: int) -> Report:
    """Send *count* wounded messages while a job streams; memory is compared from *warm_up* messages on."""
    draw = random.Random(seed)
    with running.producer() as reader, running.producer() as attacker:
        job_id = draw.randbytes(16)
        script = f'{{"tokens": 1000000, "token_s": {STREAM_TOKEN_S}}}'
        job = Job(prompt="on and on", max_tokens=1_000_000, metadata={"script": script})
        attacker.submit(ENDED, script={"tokens": 3})
        attacker.last_word(ENDED)
        reader.say(m.Submit(job_id, wire.pack_body(job.to_map())))
        stream, tally = Stream(reader, job_id), Tally()
        while not stream.ids:
            assert reader.socket.poll(20_000), "the job does not stream"
            stream.take()
        poller = zmq.Poller()
        for producer in (reader, attacker):
            poller.register(producer.socket, zmq.POLLIN)
        before, begun = 1024 * rss_kib(running.broker.pid), time.monotonic()
        for number in range(count):
            frames = wounded(draw)
            while not tally.expect(number, frames):
                frames = wounded(draw)
            attacker.socket.send_multipart(frames)
            attacker.say(m.Ping(MARK + number))
            tally.sent += 1
            if number == warm_up:
                before = 1024 * rss_kib(running.broker.pid)
            _read(poller, attacker, stream, tally, number - WINDOW)
        _read(poller, attacker, stream, tally, count - 1)
        seconds, after = time.monotonic() - begun, 1024 * rss_kib(running.broker.pid)
        assert stream.last is None, "the stream ended under attack"
        stream.finish()
        status = reader.ask(m.Status(), m.StatusReply).status
    return Report(tally, len(stream.ids), seconds, before, after, status)


def _read(poller: zmq.Poller, attacker: Producer, stream: Stream, tally: Tally, until: int) -> None:
    """Read both sockets until the answer to message *until* is in."""
    while True:
        stream.take()
        while attacker.socket.poll(0):
            tally.take(attacker.socket.recv_multipart())
        if tally.ponged >= until:
            return
        assert poller.poll(20_000), "the broker fell silent"
