"""One job from its parsed form to its last word, without sockets: prompt, budget, tokens, text, figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mtplx.errors import BadJobError, JobError
from mtplx.job import PROMPT_FIELDS, Job, capacity_error, context_error
from mtplx.trajectory import trajectory_sha256
from worker.attempt import Attempt, Chunk, Final, Progress
from worker.engine.engine import Cancelled, EngineRequest, Figures, NumericError
from worker.engine.load import LoadedModel
from worker.engine.sample import Sampling
from worker.text import TextStream, encode_prompt
from worker.width import Meta, WidthGate, WidthPlan

Clock = Callable[[], float]


def run_job(
    attempt: Attempt,
    gate: WidthGate,
    loaded: LoadedModel,
    *,
    clock: Clock,
    cancelled: Callable[[], bool],
    progress: Progress,
) -> Iterator[Chunk | Final]:
    """Run one attempt at the width that *gate* plans for it: a Chunk for each token drawn, then one Final.

    *cancelled* is asked between two prefill chunks and between two tokens; text still held back is then dropped.
    Closing the iterator ends the attempt as well. The engine is stopped on every way out.

    Raises:
        BadJobError: when the job does not fit the model or the engine's memory; nothing was computed.
        JobError: with code E_NUMERIC, when the model's numbers are not finite; with E_MODEL_CHANGED, when the
            model has no such ids as were drawn.
    """
    began = clock()
    prompt, budget = _admit(attempt, loaded, gate.singleton.capacity)
    left = budget - len(attempt.drawn)
    plan = gate.plan(Meta(speculation=attempt.job.speculation, prompt=len(prompt), budget=left))
    engine = gate.engine(plan)
    answer = _Answer(attempt.job, loaded, budget)
    for token in attempt.drawn:
        answer.take(token)
    times = _Times(began)

    def reading(done: int, total: int) -> None:
        progress("prefill", done, total)
        if cancelled():
            raise Cancelled

    try:
        if answer.reason is None:
            engine.start(_request(attempt, prompt, left), reading)
        times.prefill_ended = clock()
        while answer.reason is None:
            if cancelled():
                raise Cancelled
            first, step = len(answer.ids), engine.step()
            text = answer.take(step.token)
            times.token(clock())
            progress("decode", len(answer.ids), budget)
            yield Chunk(first, (step.token,), text, (tuple(step.logprobs),) if step.logprobs is not None else None)
    except Cancelled:
        answer.reason = "cancelled"
        if times.prefill_ended is None:
            times.prefill_ended = clock()
    except NumericError as error:
        raise JobError(f"The answer broke off at token {len(answer.ids)}: {error}.", code="E_NUMERIC") from error
    finally:
        figures = engine.stop()
    yield _final(answer, len(prompt), times, figures, plan)


def _admit(attempt: Attempt, loaded: LoadedModel, capacity: int) -> tuple[tuple[int, ...], int]:
    """The ids of the prompt and the budget that fits behind it, before any forward."""
    job = attempt.job
    job.check(loaded.limits)
    if any(token >= loaded.vocabulary for token in attempt.drawn):
        raise JobError(
            f"The answer has id {max(attempt.drawn)}; this model's ids are 0 to {loaded.vocabulary - 1}. "
            "Submit the job under a new id.",
            code="E_MODEL_CHANGED",
        )
    prompt = tuple(encode_prompt(loaded.tokenizer, job))
    name = next(name for name in PROMPT_FIELDS if getattr(job, name) is not None)
    strange = next((token for token in prompt if token >= loaded.vocabulary), None)
    if strange is not None:
        raise BadJobError(
            f"{name} becomes id {strange}; this model's ids are 0 to {loaded.vocabulary - 1}.",
            field=name,
            detail={"id": strange, "vocabulary": loaded.vocabulary},
        )
    if len(prompt) >= loaded.context:
        raise context_error(name, len(prompt), loaded.context)
    if len(prompt) >= capacity:
        raise capacity_error(name, len(prompt), capacity)
    budget = min(job.max_tokens, min(loaded.context, capacity) - len(prompt))
    # Drawn by a worker with more room: the answer ends there.
    return prompt, max(budget, len(attempt.drawn))


def _request(attempt: Attempt, prompt: tuple[int, ...], left: int) -> EngineRequest:
    job = attempt.job
    sampling = Sampling(
        seed=attempt.seed,
        temperature=job.temperature,
        top_p=job.top_p,
        top_k=job.top_k,
        min_p=job.min_p,
        repetition_penalty=job.repetition_penalty,
        presence_penalty=job.presence_penalty,
        frequency_penalty=job.frequency_penalty,
        penalty_window=job.penalty_window,
        logit_bias=job.logit_bias,
        logprobs=job.logprobs,
    )
    return EngineRequest(prompt=prompt, drawn=attempt.drawn, sampling=sampling, max_tokens=left, cache=job.cache)


class _Answer:
    """The ids and the text of the answer so far, and why it is over."""

    def __init__(self, job: Job, loaded: LoadedModel, budget: int) -> None:
        self.ids: list[int] = []
        self.budget = budget
        self.reason: str | None = None
        self._ends = loaded.eos_ids
        self._text = TextStream(loaded.tokenizer, job.stop)

    def take(self, token: int) -> str:
        """Add a drawn id; returns the text it releases. The last one releases all that was held back."""
        self.ids.append(token)
        if token in self._ends:
            self.reason = "stop"
            return self._text.finish()
        text = self._text.add(token)
        if len(self.ids) == self.budget and not self._text.stopped:
            self.reason = "length"
            text += self._text.finish()
        if self._text.stopped:
            self.reason = "stop"
        return text


class _Times:
    def __init__(self, began: float) -> None:
        self.began = began
        self.prefill_ended: float | None = None
        self.first: float | None = None
        self.last = began

    def token(self, now: float) -> None:
        self.first = now if self.first is None else self.first
        self.last = now


def _final(answer: _Answer, prompt_tokens: int, times: _Times, figures: Figures, plan: WidthPlan) -> Final:
    read = times.began if times.prefill_ended is None else times.prefill_ended
    return Final(
        finish_reason=answer.reason or "",
        prompt_tokens=prompt_tokens,
        cached_tokens=figures.cached_tokens,
        completion_tokens=len(answer.ids),
        max_tokens_used=answer.budget,
        prefill_s=read - times.began,
        first_token_s=None if times.first is None else times.first - times.began,
        decode_s=0.0 if times.first is None else times.last - times.first,
        sha256=trajectory_sha256(answer.ids),
        route=figures.route,
        row_invariant=figures.row_invariant,
        prefix_exact=figures.prefix_exact,
        speculation={
            "drafted": figures.drafted,
            "accepted_by_depth": list(figures.accepted_by_depth),
            "verify_forwards": figures.verify_forwards,
            "widths": {str(width): count for width, count in figures.widths.items()},
            **figures.drafting,
            **({"why": plan.why} if plan.why else {}),
        },
    )
