"""Spans and metrics as the broker has them: both, one, or neither, with or without the extra `otlp`.

Building three spans takes as long as dispatching a job. So moments wait here until the loop has nothing else to
do, and are taken a few at a time; they carry their own times, and lose nothing by waiting.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from broker.admission import Moment
from broker.back import Identity
from mtplx.errors import SettingsError
from mtplx.settings import Settings, otel_variables

log = logging.getLogger("mtplx.broker")

# Having nothing to do for so long, the loop builds: a job that follows an answer at once comes sooner.
QUIET_S: Final = 0.002
# Moments built before the loop looks for messages again, and those that may wait.
SLICE: Final = 4
MAX_MOMENTS: Final = 240
EXTRA: Final = "pip install 'mtplx-line[otlp]'"
PLAIN: Final = "text/plain; charset=utf-8"


class Part(Protocol):
    """A reader of moments."""

    def record(self, moments: list[Moment]) -> None:
        """Take them in; must not block."""

    def close(self) -> None:
        """Send what is left within a bounded time."""


class Traces(Part, Protocol):
    """Spans."""

    def lost(self) -> dict[str, int]:
        """Counts of spans that did not arrive."""


class Exposed(Part, Protocol):
    """Metrics."""

    def exposition(self) -> tuple[bytes, str]:
        """All metrics as text for Prometheus, and the content type of that text."""


class NoMetrics:
    """What stands for metrics where the extra is not installed."""

    def record(self, moments: list[Moment]) -> None:
        """Count nothing."""

    def close(self) -> None:
        """Nothing to send."""

    def exposition(self) -> tuple[bytes, str]:
        """A text without samples, which says why: Prometheus reads it as a comment."""
        return f"# Metrics need an extra of the broker: {EXTRA}\n".encode(), PLAIN


class Telemetry:
    """What the loop hands its moments to."""

    def __init__(self, traces: Traces | None, metrics: Exposed | None) -> None:
        self._traces, self.metrics = traces, metrics
        self._parts: list[Part] = [part for part in (traces, metrics) if part is not None]
        self._waiting: list[Moment] = []
        self._idle = False
        self._lost: dict[str, int] = {}

    def take(self, moments: list[Moment], *, idle: bool) -> None:
        """Take *moments* in, and build of those that wait: a few if the loop is *idle*, else what is too many."""
        self._waiting += moments
        self._idle = idle
        too_many = len(self._waiting) - MAX_MOMENTS
        self._build(max(SLICE if idle else 0, too_many))

    def wake_s(self) -> float:
        """Seconds after which the loop should come back to build, if nothing else happens before."""
        if not self._waiting:
            return math.inf
        return 0.0 if self._idle else QUIET_S

    def newly_lost(self) -> dict[str, int]:
        """By how much the counts of spans that did not arrive have grown since the last call, for health."""
        found = self._traces.lost() if self._traces is not None else {}
        grown = {name: count - self._lost.get(name, 0) for name, count in found.items()}
        self._lost = found
        return grown

    def _build(self, count: int) -> None:
        some, self._waiting = self._waiting[:count], self._waiting[count:]
        for part in self._parts:
            part.record(some)

    def close(self) -> None:
        """Build the rest and flush both at once: a collector that is away costs one limit, not two."""
        self._build(len(self._waiting))
        closers = [threading.Thread(target=part.close, daemon=True) for part in self._parts]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()


def open_telemetry(
    settings: Settings, identity: Identity, depth: Callable[[], int], *, exposed: bool
) -> Telemetry | None:
    """What *settings* and the standard `OTEL_*` variables ask for; None where that is nothing.

    depth: the number of jobs that wait. exposed: whether somebody will ask for the exposition.

    Raises:
        SettingsError: spans are wanted and cannot be written, or need the extra; or a variable is wrong.
    """
    variables = otel_variables()
    pushed = settings.otlp_endpoint or any(
        key.endswith(("TRACES_ENDPOINT", "METRICS_ENDPOINT")) for key in variables
    )
    if not (exposed or pushed or settings.trace_file):
        return None
    try:
        return _opened(settings, variables, identity, depth, exposed=exposed)
    except ImportError as error:
        if pushed or settings.trace_file:
            raise SettingsError(f"Tracing needs the extra: {EXTRA}.") from error
        return Telemetry(None, NoMetrics())
    except ValueError as error:
        # The SDK reads variables of its own.
        raise SettingsError(f"A variable of OpenTelemetry is wrong: {error}.") from error


def _opened(
    settings: Settings,
    variables: Mapping[str, str],
    identity: Identity,
    depth: Callable[[], int],
    *,
    exposed: bool,
) -> Telemetry | None:
    # An optional extra, which takes half a second to import: without it, or a use for it, the broker runs too.
    from broker import export, metrics, tracing  # noqa: PLC0415

    to = export.Destinations.of(settings, variables)
    for sentence in to.wrong:
        log.warning(sentence)
    try:
        processors = export.processors(settings.trace_file, to)
    except OSError as error:
        raise SettingsError(f"Spans cannot be written to --trace-file {settings.trace_file}: {error}.") from error
    version, boot_id = identity.version, identity.boot_id
    spans = None
    if processors:
        spans = tracing.SpanTracer(
            processors, version=version, boot_id=boot_id, link_only=settings.trace_link_only
        )
    counted = None
    if exposed or to.metrics:
        counted = metrics.Metrics(to, version=version, depth=depth, lost=spans.lost if spans else dict)
    return Telemetry(spans, counted) if spans or counted else None
