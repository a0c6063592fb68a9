"""Between text and token ids: the prompt on its way in, the pieces of the answer on their way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from jinja2 import TemplateError
from mlx_lm.generate import TextStateMachine

from mtplx.errors import BadJobError
from mtplx.job import Job

# What a template's own expressions can raise on content they were not written for.
_TEMPLATE_FAULTS: Final = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class StopFilter:
    """Cuts a text exactly before the first stop string, however the text arrives in pieces.

    What may be the beginning of a stop string is held back, never more than the longest one less a character.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stopped = False
        self._most_held = max(map(len, stop), default=1) - 1
        edges = {"text": [(string, None) for string in stop]} if stop else {}
        self._state: Any = TextStateMachine(edges).make_state("text")

    def feed(self, piece: str) -> str:
        """The text that *piece* releases; `stopped` is set when a stop string is complete."""
        if self.stopped:
            return ""
        self._state, released, name = TextStateMachine.step(self._state, piece)
        if name is None:
            self.stopped = True
            return str(released)
        # mlx-lm lets go of a repeating beginning only once it fails; a stop string cannot reach back that far.
        name, node, states, held = self._state
        sure = max(0, len(held) - self._most_held)
        self._state = (name, node, states, held[sure:])
        return str(released + held[:sure])

    def finish(self) -> str:
        """What was still held back: no more text comes that could complete a stop string."""
        if self.stopped:
            return ""
        self._state, held, _ = TextStateMachine.flush(self._state)
        return str(held)


class TextStream:
    """The text of an answer as its tokens arrive: whole characters only, and nothing from a stop string on.

    A token counts as the one that completed a stop string when the text up to it is certain: mlx-lm's detokenizer
    keeps an unfinished character, and a lone space, until the next token.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._detokenizer = tokenizer.detokenizer
        self._filter = StopFilter(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed."""
        return self._filter.stopped

    def add(self, token: int) -> str:
        """The text that *token* releases; empty while it is held back."""
        self._detokenizer.add_token(token)
        return self._filter.feed(self._detokenizer.last_segment)

    def finish(self) -> str:
        """The rest of the text; this too can complete a stop string."""
        self._detokenizer.finalize()
        return self._filter.feed(self._detokenizer.last_segment) + self._filter.finish()


def encode_prompt(tokenizer: Any, job: Job) -> list[int]:
    """The ids of a job's prompt, with exactly one begin token where the tokenizer puts one before a text.

    `token_ids` are taken as they are. Messages go through the model's chat template, which also opens the answer.

    Raises:
        BadJobError: when the template is missing or refuses the messages, or nothing is left to read.
    """
    if job.token_ids is not None:
        return list(job.token_ids)
    if job.messages is not None:
        name, ids = "messages", _render(tokenizer, job.messages)
    else:
        name, ids = "prompt", list(tokenizer.encode(job.prompt or ""))
    if not ids:
        raise BadJobError(f"{name} has no tokens; give it some text.", field=name)
    return _one_begin(tokenizer, ids)


def _render(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    if not tokenizer.has_chat_template:
        raise BadJobError("This model has no chat template; send prompt or token_ids instead.", field="messages")
    try:
        return list(tokenizer.apply_chat_template([dict(each) for each in messages], add_generation_prompt=True))
    except _TEMPLATE_FAULTS as error:
        raise BadJobError(f"The model's chat template refuses the messages: {error}", field="messages") from error


def _one_begin(tokenizer: Any, ids: list[int]) -> list[int]:
    """*ids* as they are, unless the tokenizer opens every text with a begin token: then with exactly one."""
    begin = tokenizer.bos_token_id
    if begin is None or tokenizer.encode("a")[:1] != [begin]:
        return ids
    text = next((i for i, token in enumerate(ids) if token != begin), len(ids))
    return [begin, *ids[text:]]
