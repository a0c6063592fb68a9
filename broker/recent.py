"""What went on lately, for whoever watches: waits, faults, speed, speculation. Bounded; no text of a job."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Final

from broker.record import Now, Record
from mtplx.errors import CODES
from mtplx.messages import Done, Error

# Waits are summed up over so many seconds, and so many sums are kept: the last 20 minutes.
BUCKET_S: Final = 15
BUCKETS: Final = 80
# Different faults that are remembered; equal ones are counted.
MAX_FAULTS: Final = 10
# Speed is that of the last samples, one a beat.
SAMPLES: Final = 3
# Depths and widths of forwards that are counted; no forward has more rows.
MAX_DEPTH: Final = 64
MAX_WIDTH: Final = 1024
# Below 2^53 a sum of any number of jobs still fits a frame.
MAX_COUNT: Final = 2**53


@dataclass(slots=True)
class Waits:
    """The waits of the jobs that began to run in one bucket of time, in seconds."""

    bucket: int
    jobs: int = 0
    total_s: float = 0.0
    max_s: float = 0.0


@dataclass(slots=True)
class Fault:
    """Something that went wrong, the last time it did. meaning is a sentence of ours, never of a job."""

    at_ns: int
    what: str
    code: str
    meaning: str
    admit_seq: int | None
    count: int = 1


class Recent:
    """Kept by the gate, told by health. Times are those of the events."""

    def __init__(self) -> None:
        self._waits: deque[Waits] = deque(maxlen=BUCKETS)
        self._faults: OrderedDict[tuple[str, str], Fault] = OrderedDict()
        self._samples: deque[tuple[int, float, int]] = deque(maxlen=SAMPLES)
        self._last: dict[str, Any] | None = None
        self._forwards: Counter[int] = Counter()
        self._accepted = [0] * MAX_DEPTH

    def began(self, wait_s: float, now: Now) -> None:
        """A job began to run after it waited for *wait_s*."""
        bucket = int(now.mono // BUCKET_S)
        if not self._waits or self._waits[-1].bucket != bucket:
            self._waits.append(Waits(bucket))
        waits = self._waits[-1]
        waits.jobs += 1
        waits.total_s += wait_s
        waits.max_s = max(waits.max_s, wait_s)

    def sample(self, record: Record | None, now: Now) -> None:
        """Note how far the running job is; once a beat."""
        if record is not None and record.run is not None:
            self._samples.append((record.run.lease, now.mono, record.tokens))

    def speed(self, record: Record, now: Now) -> float | None:
        """Tokens a second of the running job, of its last beats; None before its second token."""
        run = record.run
        if run is None or run.first_token is None:
            return None
        since = [(at, tokens) for lease, at, tokens in self._samples if lease == run.lease and tokens > run.behind]
        # The first token came by the prompt, and is no measure of what follows.
        at, tokens = since[0] if since else (run.first_token.mono, run.behind + 1)
        drawn, took = record.tokens - tokens, now.mono - at
        return drawn / took if took > 0 and (drawn > 0 or since) else None

    def ended(self, record: Record, now: Now) -> None:
        """A job got its last word."""
        word = record.last_word
        if isinstance(word, Error):
            self.fault("job", word.code, CODES[word.code].meaning, now, record.admit_seq)
        elif isinstance(word, Done) and record.run is not None:
            decode_s = word.timings.get("decode_s") or 0.0
            drawn = record.tokens - record.run.behind - 1
            self._last = {
                "admit_seq": record.admit_seq,
                "at": now.wall_ns / 1e9,
                "outcome": word.outcome,
                "tokens": record.tokens,
                "tokens_per_s": drawn / decode_s if decode_s > 0 and drawn > 0 else None,
            }
            self._count(word.run.get("speculation") or {})

    def fault(self, what: str, code: str, meaning: str, now: Now, admit_seq: int | None = None) -> None:
        """Something went wrong: *what* is `job`, `refusal` or `worker`."""
        known = self._faults.pop((what, code), None)
        count = 1 if known is None else known.count + 1
        self._faults[what, code] = Fault(now.wall_ns, what, code, meaning, admit_seq, count)
        if len(self._faults) > MAX_FAULTS:
            self._faults.popitem(last=False)

    def _count(self, speculation: dict[str, Any]) -> None:
        # The worker's figures are for people: strange ones count as none and never cost a job its end.
        widths, accepted = speculation.get("widths"), speculation.get("accepted_by_depth")
        for rows, count in widths.items() if isinstance(widths, dict) else ():
            if isinstance(rows, str) and rows.isascii() and rows.isdigit() and len(rows) < 5 and _is_count(count):
                self._forwards[min(int(rows), MAX_WIDTH)] += count
        for depth, count in enumerate(accepted[:MAX_DEPTH] if isinstance(accepted, list | tuple) else ()):
            if _is_count(count):
                self._accepted[depth] += count

    def report(self, now: Now) -> dict[str, Any]:
        """The `recent` part of health."""
        bucket = int(now.mono // BUCKET_S)
        deep = max((depth + 1 for depth, count in enumerate(self._accepted) if count), default=0)
        return {
            "waits": {
                "bucket_s": BUCKET_S,
                "buckets": [
                    [bucket - one.bucket, one.jobs, round(one.total_s / one.jobs, 3), round(one.max_s, 3)]
                    for one in self._waits
                    if bucket - one.bucket < BUCKETS
                ],
            },
            "forwards_by_width": {str(rows): self._forwards[rows] for rows in sorted(self._forwards)},
            "accepted_by_depth": self._accepted[:deep],
            "faults": [_shown(fault) for fault in reversed(self._faults.values())],
            "last_job": self._last,
        }


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _shown(fault: Fault) -> dict[str, Any]:
    return {
        "at": fault.at_ns / 1e9,
        "what": fault.what,
        "code": fault.code,
        "meaning": fault.meaning,
        "admit_seq": fault.admit_seq,
        "count": fault.count,
    }
