"""Span and attribute names, as literals: semantic conventions 1.41.1 (messaging, GenAI) and our own `mtplx.*`."""

from __future__ import annotations

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.41.1"
SERVICE: Final = "mtplx-broker"
SYSTEM: Final = "mtplx"
DESTINATION: Final = "mtplx.jobs"
PROVIDER: Final = "mlx"

MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_DESTINATION: Final = "messaging.destination.name"
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
ERROR_TYPE: Final = "error.type"

GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_STOP: Final = "gen_ai.request.stop_sequences"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

ADMIT_SEQ: Final = "mtplx.admit_seq"
ATTEMPT: Final = "mtplx.attempt"
QUEUE_DEPTH: Final = "mtplx.queue.depth"
BOOT_ID: Final = "mtplx.boot_id"
OUTCOME: Final = "mtplx.outcome"
CHUNKS: Final = "mtplx.chunks"
ROUTE: Final = "mtplx.route"
PREFILL: Final = "mtplx.prefill_s"
DECODE: Final = "mtplx.decode_s"
TIME_TO_FIRST_TOKEN: Final = "mtplx.time_to_first_token_s"  # noqa: S105 - a token of text
EVENT_FIRST_TOKEN: Final = "mtplx.first_token"  # noqa: S105 - a token of text
EVENT_WORKER_LOST: Final = "mtplx.worker_lost"
EVENT_CANCELLING: Final = "mtplx.cancelling"
EVENT_REASON: Final = "mtplx.reason"
EVENT_RESTORED: Final = "mtplx.restored"
HANDED_BACK: Final = "handed_back"
