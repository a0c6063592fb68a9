"""Jobs that are refused whatever the model: every field with every kind of wrong value."""

from __future__ import annotations

from typing import Any

import msgpack


def bad_jobs() -> list[dict[str, Any]]:
    """Bodies of SUBMIT that are refused with E_BAD_JOB, whatever the model, and the field named."""
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    prompt = {"prompt": "Hi"}
    rows: list[tuple[Any, str]] = [
        ({}, "prompt"),
        ({"max_tokens": 5}, "prompt"),
        ({"prompt": "Hi", "token_ids": [1]}, "token_ids"),
        ({"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}, "messages"),
        *(({"prompt": value}, "prompt") for value in ("", None, 5, b"Hi", ["Hi"], deep)),
        *(({"messages": value}, "messages") for value in ([], None, "Hi", {"role": "user"}, 5)),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "Hi", "name": "Bo"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "", "content": "Hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content"),
        *(({"token_ids": value}, "token_ids") for value in ([], None, "1", 5, {"0": 1}, b"\x01")),
        *(({"token_ids": [1, value]}, "token_ids[1]") for value in (-7, 2**31, 1.0, True, None, "1", [1])),
    ]
    nan, infinite = float("nan"), float("inf")
    numbers: dict[str, list[Any]] = {
        "max_tokens": [0, -1, -5, 2**31, 2**63, 16.0],
        "temperature": [-0.1, 1e-5, 100.5, infinite, -infinite, nan],
        "top_p": [0, -0.5, 1.5, nan, infinite],
        "top_k": [-1, 2**31, 1.0],
        "min_p": [-0.1, 1.5, nan],
        "seed": [-1, 1.0],
        "repetition_penalty": [0, -1.0, 101, nan, infinite],
        "presence_penalty": [-100.5, 100.5, nan, infinite],
        "frequency_penalty": [-100.5, 100.5, nan, infinite],
        "penalty_window": [-1, 2**31, 1.0],
        "logprobs": [-1, 21, 1.0],
    }
    for name, values in numbers.items():
        rows += [({**prompt, name: value}, name) for value in (*values, True, None, "x", [1], deep)]
    more: list[tuple[str, Any, str]] = [
        *(("stop", value, "stop") for value in ("END", [], None, ["x"] * 17, {"0": "x"}, 5)),
        *(("stop", ["x", value], "stop[1]") for value in (5, "", None, "x" * 257, ["x"])),
        *(("logit_bias", value, "logit_bias") for value in (None, [], [[1, 2.0]], "1", {"-1": 1.0}, {"1.0": 1.0})),
        *(("logit_bias", value, "logit_bias") for value in ({"x": 1.0}, {"": 1.0}, {"01": 1.0}, {" 1": 1.0})),
        ("logit_bias", {str(token): 1.0 for token in range(1025)}, "logit_bias"),
        *(("logit_bias", {"7": value}, "logit_bias[7]") for value in (None, nan, infinite, "1", True, 1000.5)),
        *(("speculation", value, "speculation") for value in ("on", None, True, 1, ["auto"])),
        *(("cache", value, "cache") for value in ("all", None, 1, 0, ["answers"])),
        *(("metadata", value, "metadata") for value in (None, [], "x", {str(key): "" for key in range(17)})),
        *(("metadata", {"k": value}, "metadata[k]") for value in (None, 5, ["x"], {"k": "x"})),
        ("metadata", {"": "x"}, "metadata key"),
        ("metadata", {"k": "x" * 4096}, "metadata"),
        *((name, 1, name) for name in ("n", "response_format", "tools", "max_token", "Prompt")),
    ]
    rows += [({**prompt, name: value}, field) for name, value, field in more]
    return [
        {"body": bytes(msgpack.packb(body)).hex(), "code": "E_BAD_JOB", "field": field} for body, field in rows
    ]
