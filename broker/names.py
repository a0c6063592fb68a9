"""Names of spans, attributes and metrics: semantic conventions 1.41.1 (messaging, GenAI) and our own `mtplx.*`.

All of them are literals: the conventions are still moving, and a library's constants move with them.
"""

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
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
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
STAGE: Final = "mtplx.stage"
SEED: Final = "mtplx.seed"
RESUMED_TOKENS: Final = "mtplx.resumed_tokens"
PREFILL: Final = "mtplx.prefill_s"
DECODE: Final = "mtplx.decode_s"
TIME_TO_FIRST_TOKEN: Final = "mtplx.time_to_first_token_s"  # noqa: S105 - a token of text
DRAFTED: Final = "mtplx.speculation.drafted"
ACCEPTED: Final = "mtplx.speculation.accepted"
ACCEPTED_BY_DEPTH: Final = "mtplx.speculation.accepted_by_depth"
VERIFY_FORWARDS: Final = "mtplx.speculation.verify_forwards"
WIDTHS: Final = "mtplx.speculation.widths"
FORK_ATTEMPTS: Final = "mtplx.speculation.fork_attempts"
FORK_WINS: Final = "mtplx.speculation.fork_wins"
REASON: Final = "mtplx.reason"

EVENT_FIRST_TOKEN: Final = "mtplx.first_token"  # noqa: S105 - a token of text
EVENT_WORKER_LOST: Final = "mtplx.worker_lost"
EVENT_RESUMED: Final = "mtplx.resumed"
EVENT_RESTORED: Final = "mtplx.restored"
EVENT_CANCELLING: Final = "mtplx.cancelling"
EVENT_CANCELLED: Final = "mtplx.cancelled"
EVENT_FORK_WIN: Final = "mtplx.fork_win"

METRIC_REQUEST: Final = "gen_ai.server.request.duration"
METRIC_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"  # noqa: S105 - a token of text
METRIC_TOKEN: Final = "gen_ai.server.time_per_output_token"  # noqa: S105 - a token of text
METRIC_PROCESS: Final = "messaging.process.duration"
METRIC_DEPTH: Final = "mtplx.queue.depth"
METRIC_WIDTH: Final = "mtplx.request.width"
METRIC_FORWARDS: Final = "mtplx.forwards"
METRIC_SPANS_LOST: Final = "mtplx.spans.lost"
WIDTH: Final = "mtplx.width"

# What ended an attempt that is not counted.
HANDED_BACK: Final = "handed_back"
