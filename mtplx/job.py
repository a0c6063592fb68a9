"""A job: what a producer asks, checked the same way by the client, the broker and the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from mtplx.errors import BadJobError

MAX_INT = 2**31 - 1
MAX_SEED = 2**64 - 1
DEFAULT_MAX_TOKENS = 1024
# mlx-lm's default: penalties look at the last 20 ids of prompt and answer.
DEFAULT_PENALTY_WINDOW = 20
MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_BIASES, MAX_BIAS = 1024, 1000.0
MAX_METADATA, MAX_METADATA_BYTES = 16, 4096
# Below this a float32 division of log-probabilities overflows; 0 is the greedy choice.
MIN_TEMPERATURE = 1e-4

PROMPT_FIELDS = ("prompt", "messages", "token_ids")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the loaded model can take.

    vocabulary: number of ids that have a token (padded rows of the head do not count).
    context: most positions of a job, prompt and answer together: the model's, or fewer where a worker told fewer.
    """

    vocabulary: int
    context: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request. Exactly one of `prompt`, `messages`, `token_ids` is set.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch a filter off, and a top_k at or above
    the vocabulary filters nothing. `penalty_window` counts ids of prompt and answer (0 = all).
    `seed` None lets the broker draw one, which ADMITTED and DONE report.
    """

    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = DEFAULT_PENALTY_WINDOW
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int = 0
    speculation: Literal["auto", "off"] = "auto"
    cache: bool | Literal["answers"] = True
    metadata: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, body: Any) -> Job:
        """The job of a decoded SUBMIT body.

        Raises:
            BadJobError: naming the first field that is unknown, missing or wrong.
        """
        if type(body) is not dict and not isinstance(body, Mapping):
            raise BadJobError("A job is a map of fields.", field="body")
        for name in body:
            if name not in _CHECKS:
                raise BadJobError(
                    f"Unknown job field {_shown(name)}; known are {', '.join(_CHECKS)}.", field=_shown(name)
                )
        given = [name for name in PROMPT_FIELDS if name in body]
        if len(given) != 1:
            named = " and ".join(given) or "none of them"
            raise BadJobError(
                f"Give exactly one of prompt, messages and token_ids; this job has {named}.",
                field=given[1] if given else "prompt",
            )
        checked = {name: _CHECKS[name](name, value) for name, value in body.items()}
        # Setting the fields of a frozen class one by one costs more than all the checks. Default maps are shared.
        job = object.__new__(cls)
        job.__dict__.update(_DEFAULTS)
        job.__dict__.update(checked)
        return job

    def to_map(self) -> dict[str, Any]:
        """The body of SUBMIT: only what differs from the defaults, ready for msgpack or JSON."""
        body: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value == _DEFAULTS[item.name]:
                continue
            body[item.name] = list(value) if isinstance(value, tuple) else value
        if self.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return body

    def check(self, limits: ModelLimits) -> None:
        """Refuse ids the model does not have; an id out of range crashes MLX's CPU build.

        Raises:
            BadJobError: naming the field and the vocabulary size.
        """
        for name, ids in (("token_ids", self.token_ids or ()), ("logit_bias", self.logit_bias)):
            bad = next((token for token in ids if not 0 <= token < limits.vocabulary), None)
            if bad is not None:
                raise BadJobError(
                    f"{name} has id {bad}; this model's ids are 0 to {limits.vocabulary - 1}.",
                    field=name,
                    detail={"id": bad, "vocabulary": limits.vocabulary},
                )
        if self.token_ids is not None and len(self.token_ids) >= limits.context:
            raise context_error("token_ids", len(self.token_ids), limits.context)


def context_error(name: str, prompt_tokens: int, context: int) -> BadJobError:
    """The refusal of a prompt that leaves no position for an answer."""
    return BadJobError(
        f"The prompt has {prompt_tokens} tokens, and prompt and answer together may have {context}, "
        "one of which the answer needs; shorten the prompt.",
        field=name,
        detail={"prompt_tokens": prompt_tokens, "context": context},
    )


def capacity_error(name: str, prompt_tokens: int, capacity: int) -> BadJobError:
    """The refusal of a prompt that the worker's memory for keys and values cannot hold together with an answer."""
    return BadJobError(
        f"The prompt has {prompt_tokens} tokens and the worker's KV memory {capacity} positions, "
        "one of which the answer needs; shorten the prompt, or give the worker more by --kv-memory.",
        field=name,
        detail={"prompt_tokens": prompt_tokens, "capacity": capacity},
    )


def _shown(name: Any) -> str:
    if not isinstance(name, str):
        return type(name).__name__
    # A lone surrogate of a name could not be sent, printed or stored.
    return name[:64].encode(errors="backslashreplace").decode()


def _wrong(name: str, wanted: str, value: Any) -> BadJobError:
    # Containers are hostile to repr(): deep ones recurse, long ones take time.
    shown = "" if isinstance(value, Mapping | list | tuple | bytes) else f" {value!r}"[:64]
    got = "null" if value is None else f"{type(value).__name__}{shown}"
    return BadJobError(f"{name} must be {wanted}, not {got}.", field=name)


def _int(low: int, high: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _wrong(name, f"an integer from {low} to {high}", value)
        return value

    return check


def _float(wanted: str, holds: Callable[[float], bool]) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        # NaN fails every comparison of `holds`; an int too large for a float is out of every range.
        if type(value) not in (int, float) or abs(value) > MAX_SEED or not holds(value):
            raise _wrong(name, wanted, value)
        return float(value)

    return check


def _text(name: str, value: Any) -> str:
    if type(value) is not str or not value:
        raise _wrong(name, "a non-empty string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadJobError(f"{name} has a lone surrogate, which is not text.", field=name) from None
    return value


def _choice(*allowed: Any) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if not any(value is one or (type(value) is str and value == one) for one in allowed):
            raise _wrong(name, " or ".join(repr(one) for one in allowed), value)
        return value

    return check


def _messages(name: str, value: Any) -> tuple[dict[str, str], ...]:
    if type(value) not in (list, tuple) or not value:
        raise _wrong(name, "a non-empty list of {role, content}", value)
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise _wrong(f"{name}[{number}]", "a map with exactly role and content", message)
        _text(f"{name}[{number}].role", message["role"])
        if message["content"] != "":
            _text(f"{name}[{number}].content", message["content"])
    return tuple(dict(message) for message in value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if type(value) not in (list, tuple) or not value:
        raise _wrong(name, "a non-empty list of token ids", value)
    # A prompt may be millions of ids: they are looked at one by one only to name the wrong one.
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_INT:
        for number, token in enumerate(value):
            if type(token) is not int or not 0 <= token <= MAX_INT:
                raise _wrong(f"{name}[{number}]", "a token id", token)
    return tuple(value)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    if type(value) not in (list, tuple) or not 1 <= len(value) <= MAX_STOPS:
        raise _wrong(name, f"a list of 1 to {MAX_STOPS} strings", value)
    for number, text in enumerate(value):
        if len(_text(f"{name}[{number}]", text)) > MAX_STOP_CHARS:
            raise _wrong(f"{name}[{number}]", f"at most {MAX_STOP_CHARS} characters", text)
    return tuple(value)


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        raise _wrong(name, f"a map of at most {MAX_BIASES} token ids to numbers", value)
    number = _float(f"a number from -{MAX_BIAS:g} to {MAX_BIAS:g}", lambda bias: abs(bias) <= MAX_BIAS)
    named = [(_bias_id(name, key), bias) for key, bias in value.items()]
    biases = {token: number(f"{name}[{token}]", bias) for token, bias in named}
    if len(biases) != len(value):
        raise BadJobError(f"{name} names one token id twice.", field=name)
    return biases


def _bias_id(name: str, key: Any) -> int:
    if type(key) is int and 0 <= key <= MAX_INT:
        return key
    # One spelling for each id, so that no two keys mean the same token.
    if type(key) is str and key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key:
        return int(key)
    raise _wrong(name, "keyed by decimal token ids", key)


def _metadata(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > MAX_METADATA:
        raise _wrong(name, f"a map of at most {MAX_METADATA} strings", value)
    size = 0
    for key, text in value.items():
        size += len(_text(f"{name} key", key).encode())
        if text != "":
            size += len(_text(f"{name}[{_shown(key)}]", text).encode())
    if size > MAX_METADATA_BYTES:
        raise BadJobError(f"{name} has {size} bytes; at most {MAX_METADATA_BYTES} travel.", field=name)
    return dict(value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "prompt": _text,
    "messages": _messages,
    "token_ids": _token_ids,
    "max_tokens": _int(1, MAX_INT),
    "temperature": _float(
        f"0 or a number from {MIN_TEMPERATURE:g} to 100", lambda x: x == 0 or MIN_TEMPERATURE <= x <= 100
    ),
    "top_p": _float("a number above 0, at most 1", lambda x: 0 < x <= 1),
    "top_k": _int(0, MAX_INT),
    "min_p": _float("a number from 0 to 1", lambda x: 0 <= x <= 1),
    "seed": _int(0, MAX_SEED),
    "stop": _stop,
    "repetition_penalty": _float("a number from 0.001 to 100", lambda x: 1e-3 <= x <= 100),
    "presence_penalty": _float("a number from -100 to 100", lambda x: abs(x) <= 100),
    "frequency_penalty": _float("a number from -100 to 100", lambda x: abs(x) <= 100),
    "penalty_window": _int(0, MAX_INT),
    "logit_bias": _logit_bias,
    "logprobs": _int(0, MAX_LOGPROBS),
    "speculation": _choice("auto", "off"),
    "cache": _choice(True, "answers", False),
    "metadata": _metadata,
}

# What `to_map` leaves out, because every reader fills it in again.
_DEFAULTS: dict[str, Any] = {item.name: getattr(Job(), item.name) for item in fields(Job)}
