"""Settings of all programs: flag, then `MTPLX_*` variable, then TOML file, then default.

This is the only file that reads the environment. Anything unknown is an error that lists what is known.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from mtplx import paths
from mtplx.endpoints import check_endpoint, leaves_machine, one_place
from mtplx.errors import SettingsError
from mtplx.http_place import HttpPlace, http_place, is_http_address
from mtplx.sizes import parse_size

PREFIX: Final = "MTPLX_"
STAGES: Final = ("auto", "h0", "h1", "h2")
DRAFTS: Final = ("auto", "ngram", "mtp", "none")
PRESETS: Final = ("solo", "latency", "agent", "throughput")
DURABILITIES: Final = ("full", "os", "none")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")


class SchedulerMode(StrEnum):
    """How a job uses the device. Both modes run one job at a time on the same decode loop.

    `hyper` may spend the device's free width on speculative rows of that one job; `serial` never does.
    """

    SERIAL = "serial"
    HYPER = "hyper"


def _setting(default: Any, text: str) -> Any:
    # SchedulerMode members are strings, never callable; folders are worked out when asked for.
    if callable(default):
        return field(default_factory=default, metadata={"help": text})
    return field(default=default, metadata={"help": text})


def _default_cache(environ: Mapping[str, str] = os.environ) -> Path:
    home = environ.get("XDG_CACHE_HOME")
    return paths.default_cache(Path(home) if home else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set. Construction checks it; a wrong value raises SettingsError."""

    model: str = _setting("smollm2-135m", "Model: a pulled name, an MLX directory, or a Hugging Face id.")
    scheduler_mode: SchedulerMode = _setting(SchedulerMode.HYPER, "Scheduler mode: hyper or serial.")
    hyper_stage: str = _setting("auto", "How far hyper goes: auto, h0, h1 or h2.")
    max_active_requests: int = _setting(1, "Always 1: one job owns the device.")
    decode_batch_max: int = _setting(1, "Always 1: there is no batch.")
    batch_wait_ms: int = _setting(0, "Always 0: there is no gather window.")
    batching_preset: str = _setting("solo", "solo or latency; batched presets are refused.")
    draft: str = _setting("auto", "Where drafts come from: auto, ngram, model:PATH, mtp, or none.")
    mtp: str = _setting("", "Directory of a head that drafts; without it the model's own, or one that we ship.")
    run_dir: Path = _setting(paths.default_run, "Folder of sockets and lock, mode 0700.")
    cache_dir: Path = _setting(_default_cache, "Folder of pulled models and compiled kernels.")
    front: str = _setting(
        "", "Endpoint for producers, ipc:// or tcp:// (encrypted beyond loopback); default in run_dir."
    )
    back: str = _setting("", "Endpoint for the worker; default in run_dir.")
    state_dir: Path | None = _setting(
        None,
        "Folder of journal and keys, mode 0700; default ~/.mtplx/state, or state in your run_dir.",
    )
    curve: bool = _setting(default=False, text="Encrypt loopback tcp as well, and ask for allowed keys there.")
    server_key: str = _setting("", "The broker's public key, or a file with it, for producers and the worker.")
    key: str = _setting("", "Your own secret key: a name of `mtplx keys new`, or a file.")
    durability: str = _setting(
        "full", "When a job counts as taken: full, it is flushed to the disk; os, written; none, in memory alone."
    )
    queue_jobs: int = _setting(1000, "Jobs that may wait; more are refused with a retry hint.")
    client_jobs: int = _setting(1000, "Jobs that one connection may have open.")
    queue_bytes: int = _setting(256 * 1024**2, "Bytes of jobs that may wait.")
    max_job_bytes: int = _setting(1024**2, "Largest job taken; checking one holds the broker up for 0.1 s a MiB.")
    retain_s: float = _setting(600.0, "Seconds an answer is kept once it was read or left.")
    retain_bytes: int = _setting(64 * 1024**2, "Bytes of finished answers kept at most, and again of unread ones.")
    orphan_s: float = _setting(10.0, "Seconds a job outlives its producer, unless it asked to finish.")
    beat_s: float = _setting(2.0, "Seconds between signs of life of worker and broker.")
    dead_s: float = _setting(10.0, "Seconds of silence after which a worker counts as dead.")
    stall_s: float = _setting(120.0, "Seconds without progress after which a beating worker counts as stalled.")
    drain_s: float = _setting(25.0, "Seconds the running job gets to end when the broker is told to stop.")
    prefill_chunk: int = _setting(512, "Prompt tokens read between two looks for a cancel.")
    kv_memory: str = _setting("auto", "Memory for keys and values: auto, or a size such as 512MB, 4GB or 1.5GiB.")
    trace_file: Path | None = _setting(None, "Write spans to this file, one JSON object a line.")
    otlp_endpoint: str = _setting("", "Send spans to this OTLP/HTTP collector, as OTEL_EXPORTER_OTLP_ENDPOINT.")
    http: str = _setting(
        "",
        "Health, metrics, page on this HOST:PORT; auto: 127.0.0.1:8000 or a free one (serve, services); off.",
    )
    http_remote: bool = _setting(default=False, text="Let other machines reach --http, unencrypted.")
    trace_prompts: bool = _setting(default=False, text="Put prompts and answers into spans as well.")
    trace_link_only: bool = _setting(
        default=False,
        text="Begin a trace for each job and link it to its producer's, in place of joining that one.",
    )
    reference: bool = _setting(default=False, text="Decode by mlx-lm's own loop, to compare with.")
    log_level: str = _setting("warning", "debug, info, warning or error.")
    log_format: str = _setting("text", "Log lines as text or json.")
    log_dir: Path | None = _setting(
        None, "Folder of log files of bounded size, mode 0700; without it the log goes to stderr."
    )

    def __post_init__(self) -> None:
        """Check every value; the automatic ones were filled in by `load`."""
        _one_of("hyper_stage", self.hyper_stage, STAGES)
        _one_of("batching_preset", self.batching_preset, PRESETS)
        _one_of("durability", self.durability, DURABILITIES)
        _one_of("log_level", self.log_level, LOG_LEVELS)
        _one_of("log_format", self.log_format, LOG_FORMATS)
        self._check_values()
        if self.dead_s < 2 * self.beat_s:
            raise SettingsError(f"--dead-s ({self.dead_s}) must be at least twice --beat-s ({self.beat_s}).")
        for name in ("front", "back"):
            check_endpoint(flag(name), self.endpoint(name))
        if one_place(self.endpoint("front")) == one_place(self.endpoint("back")):
            raise SettingsError(
                f"--front {self.endpoint('front')} and --back {self.endpoint('back')} are one endpoint; "
                "producers and the worker need one each."
            )
        if self.scheduler_mode is SchedulerMode.HYPER:
            self._refuse_batching()

    def _check_values(self) -> None:
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) <= high:
                raise SettingsError(f"{flag(name)} must be from {low} to {high}, not {getattr(self, name)}.")
        path = self.draft.removeprefix("model:").strip()
        if self.draft not in DRAFTS and (path == self.draft or not path):
            raise SettingsError(
                f"--draft {self.draft!r} is not known; it is one of {', '.join(DRAFTS)} or model:PATH, with the "
                "directory or name of a smaller model that has the same tokenizer."
            )
        if not self.model.strip():
            raise SettingsError("--model is empty; give a pulled name, a directory or a Hugging Face id.")
        try:
            _ = self.kv_bytes
        except ValueError:
            raise SettingsError(
                f"--kv-memory {self.kv_memory!r} is wrong: "
                "it must be auto, or a size such as 512MB, 4GB or 1.5GiB."
            ) from None
        _ = self.http_place
        if self.otlp_endpoint and not is_http_address(self.otlp_endpoint):
            raise SettingsError(
                f"--otlp-endpoint {self.otlp_endpoint!r} is no collector's address; write http://127.0.0.1:4318."
            )

    def _refuse_batching(self) -> None:
        reasons = {
            "max_active_requests": (1, "the whole device belongs to one request"),
            "decode_batch_max": (1, "a decode step holds one request; width is its own speculative rows"),
            "batch_wait_ms": (0, "there is no gather window: a job starts when the one before it ends"),
        }
        for name, (only, reason) in reasons.items():
            if getattr(self, name) != only:
                raise SettingsError(
                    f"{flag(name)} {getattr(self, name)} is refused in hyper mode: {reason}. Leave it at {only}."
                )
        if self.batching_preset in ("agent", "throughput"):
            raise SettingsError(
                f"--batching-preset {self.batching_preset} is refused in hyper mode: it batches several "
                "requests, and hyper runs one. Use solo or latency."
            )

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        config: Path | None = None,
    ) -> Settings:
        """The settings in force. *flags* holds only what was given on the command line.

        Raises:
            SettingsError: naming the key, where it was set, and what is allowed.
        """
        environ = os.environ if environ is None else environ
        given = _from_file(config, environ)
        given.update(_from_environment(environ))
        given.update({name: _parsed(flag(name), name, value) for name, value in (flags or {}).items()})
        if not given.get("otlp_endpoint"):
            given["otlp_endpoint"] = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
        given.setdefault("cache_dir", _default_cache(environ))
        return cls(**given)

    def endpoint(self, side: str) -> str:
        """The endpoint of *side*: `front` for producers, `back` for the worker."""
        return getattr(self, side) or f"ipc://{self.run_dir}/{side}.sock"

    def encrypted(self, side: str) -> bool:
        """Whether the broker encrypts the endpoint of *side*, and asks for allowed keys there."""
        endpoint = self.endpoint(side)
        return leaves_machine(endpoint) or (self.curve and endpoint.startswith("tcp://"))

    @property
    def state_folder(self) -> Path:
        """Where the journal and the keys lie."""
        if self.state_dir is not None:
            return self.state_dir
        # A service with a run folder of its own has a journal of its own.
        return paths.default_state() if self.run_dir == paths.default_run() else self.run_dir / "state"

    @property
    def http_place(self) -> HttpPlace | None:
        """Where the HTTP port is to be; None where there is to be none."""
        return http_place(self.http, remote=self.http_remote)

    @property
    def kv_bytes(self) -> int | None:
        """Bytes for keys and values; None if the worker is to choose."""
        return None if self.kv_memory == "auto" else parse_size(self.kv_memory)

    def environment(self) -> dict[str, str]:
        """An environment in which a child process loads these same settings."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        kept[f"{PREFIX}CONFIG"] = os.devnull
        given = {name: getattr(self, name) for name in _FIELDS}
        kept.update({PREFIX + name.upper(): str(value) for name, value in given.items() if value is not None})
        return kept

    def warnings(self) -> list[str]:
        """Sentences a program should log once at start."""
        batching = ("max_active_requests", "decode_batch_max", "batch_wait_ms", "batching_preset")
        unused = (*batching, "hyper_stage", "draft", "mtp")
        given = [flag(name) for name in unused if getattr(self, name) != _FIELDS[name].default]
        if self.scheduler_mode is SchedulerMode.SERIAL and given:
            return [f"No effect in serial mode, where one job runs at a time at width 1: {', '.join(given)}."]
        return []


# Times in seconds stay far from where clocks and poll limits overflow.
_DAY: Final = 86_400.0
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "queue_jobs": (1, 10_000_000),
    "queue_bytes": (1, 2**40),
    "client_jobs": (1, 10_000_000),
    "max_job_bytes": (1, 8 * 1024**2),
    "prefill_chunk": (1, 1_000_000),
    "beat_s": (0.01, 3600.0),
    "dead_s": (0.02, _DAY),
    "stall_s": (0.1, 30 * _DAY),
    "retain_s": (0, 365 * _DAY),
    "retain_bytes": (0, 2**40),
    "orphan_s": (0, 30 * _DAY),
    "drain_s": (0, _DAY),
}
_FIELDS: Final = {item.name: item for item in fields(Settings)}


def flag(name: str) -> str:
    """The command-line spelling of a setting."""
    return "--" + name.replace("_", "-")


def variables() -> dict[str, str]:
    """The variables in force that are meant for mtplx or for the OpenTelemetry SDK."""
    ours = {key: value for key, value in os.environ.items() if key.startswith(PREFIX)}
    return {**ours, **otel_variables()}


def otel_variables() -> dict[str, str]:
    """The standard variables of OpenTelemetry, `OTEL_*`, that are set to something."""
    return {key: value for key, value in os.environ.items() if key.startswith("OTEL_") and value.strip()}


def quiet_libraries() -> None:
    """Keep transformers, before it is imported, from advice on libraries that nothing here uses."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def kernel_folder(folder: Path) -> Path:
    """Where MLX's CUDA build looks for compiled kernels: as its own variable says, else *folder* from now on."""
    return Path(os.environ.setdefault("MLX_PTX_CACHE_DIR", str(folder)))


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    given = {}
    for key, value in environ.items():
        if not key.startswith(PREFIX) or key == f"{PREFIX}CONFIG":
            continue
        name = key.removeprefix(PREFIX).lower()
        if name not in _FIELDS or key != key.upper():
            known = ", ".join(PREFIX + known.upper() for known in ("config", *_FIELDS))
            raise SettingsError(f"Unknown variable {key}. Known are {known}.")
        given[name] = _parsed(key, name, value)
    return given


def _from_file(config: Path | None, environ: Mapping[str, str]) -> dict[str, Any]:
    asked = config or (Path(environ[f"{PREFIX}CONFIG"]) if environ.get(f"{PREFIX}CONFIG") else None)
    path = asked or paths.default_config()
    try:
        table = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        if asked is None:
            return {}
        raise SettingsError(f"The settings file {path} cannot be read: {error}.") from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"The settings file {path} cannot be read: {error}.") from error
    given = {}
    for name, value in table.items():
        if name not in _FIELDS:
            raise SettingsError(f"Unknown setting {name} in {path}. Known are {', '.join(_FIELDS)}.")
        given[name] = _parsed(f"{name} in {path}", name, value)
    return given


def _parsed(where: str, name: str, value: Any) -> Any:
    wanted = _FIELDS[name].type
    try:
        if wanted == "SchedulerMode":
            return SchedulerMode(value)
        if wanted in ("Path", "Path | None"):
            return paths.expanded(value).absolute()
        if wanted == "bool":
            return _switch(value)
        if wanted in ("int", "float"):
            return _number(int if wanted == "int" else float, value)
    except (TypeError, ValueError):
        kinds = {"int": "a whole number", "float": "a number", "bool": f"one of {', '.join(_SWITCHES)}"}
        needed = kinds.get(str(wanted), "one of " + ", ".join(SchedulerMode))
        raise SettingsError(f"{where} = {value!r} is wrong: it must be {needed}.") from None
    if not isinstance(value, str):
        raise SettingsError(f"{where} = {value!r} must be text.")
    return value


_SWITCHES: Final = {"1": True, "true": True, "0": False, "false": False}


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in _SWITCHES:
        raise ValueError(value)
    return _SWITCHES[value.lower()]


def _number(kind: type[int | float], value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(value)
    if kind is int and isinstance(value, float):
        raise TypeError(value)
    number = kind(value)
    if number != number or abs(number) == float("inf"):  # noqa: PLR0124 - NaN is the one value unequal to itself
        raise ValueError(value)
    return number


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingsError(f"{flag(name)} {value!r} is unknown; known are {', '.join(known)}.")
