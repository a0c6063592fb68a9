// An MTX/1 producer written from docs/protocol.md: says HELLO, streams one job, cancels another.
// node producer.mjs ENDPOINT - prints one JSON object a line, and exits 0 only if every rule of the page held.

import { createHash, randomBytes } from "node:crypto";
import { Dealer } from "zeromq";
import { decode, encode } from "@msgpack/msgpack";

const MAGIC = Buffer.from("MTX\x01", "latin1");
const HELLO = 0x01, SUBMIT = 0x02, CANCEL = 0x03, ACK = 0x06, BYE = 0x09;
const NAMES = {
  0x81: "WELCOME", 0x82: "ADMITTED", 0x83: "STARTED", 0x84: "CHUNK", 0x85: "DONE", 0x86: "ERROR",
  0x87: "STATUS_REPLY", 0x88: "PONG", 0x89: "DRAINING", 0x8a: "PROGRESS",
};
// Seeds use all 64 bits, which a Number cannot hold.
const BIG = { useBigInt64: true };
const TIME_LIMIT_MS = 20_000;

// Not immediate: libzmq would throw away unread last words when the broker goes.
const socket = new Dealer({ linger: 500, receiveTimeout: TIME_LIMIT_MS, sendTimeout: TIME_LIMIT_MS });
socket.connect(process.argv[2]);

const print = (value) =>
  console.log(JSON.stringify(value, (_, one) => (typeof one === "bigint" ? one.toString() : one)));

const hex = (bytes) => Buffer.from(bytes).toString("hex");

async function send(kind, header, body) {
  const frames = [MAGIC, Buffer.from([kind]), encode(header, BIG)];
  await socket.send(body === undefined ? frames : [...frames, encode(body, BIG)]);
}

async function receive() {
  const [magic, kind, header, body] = await socket.receive();
  if (!magic.equals(MAGIC)) throw new Error(`not MTX/1: ${hex(magic)}`);
  // Unknown kinds come out without a name, and are ignored by whoever waits.
  return { kind: NAMES[kind[0]], ...decode(header, BIG), ...(body && decode(body, BIG)) };
}

async function submit(job, options = {}) {
  const id = randomBytes(16);
  await send(SUBMIT, { id, ...options }, job);
  for (;;) {
    const message = await receive();
    if (message.kind === "ERROR") throw new Error(`${message.code}: ${message.message}`);
    if (message.kind === "ADMITTED" && hex(message.id) === hex(id)) return { id, seed: message.seed };
  }
}

// Reads a job to its last word, holding it to the rules of order; `onChunk` may cancel it.
async function read({ id }, onChunk = async () => {}) {
  const answer = { seq: 0, tokens: 0, text: "", hash: createHash("sha256"), started: false };
  for (;;) {
    const message = await receive();
    if (!message.id || hex(message.id) !== hex(id)) continue;
    if (message.kind === "STARTED") answer.started = true;
    if (message.kind === "ERROR") return { answer, last: message };
    if (message.kind === "CHUNK") {
      if (!answer.started) throw new Error("a chunk before STARTED");
      if (message.seq !== answer.seq) throw new Error(`chunk ${message.seq} instead of ${answer.seq}`);
      if (message.first !== answer.tokens) throw new Error(`token ${message.first} instead of ${answer.tokens}`);
      if (message.n !== message.ids.length) throw new Error("n is not the number of ids");
      answer.seq += 1;
      answer.tokens += message.n;
      answer.text += message.text;
      for (const token of message.ids) {
        const word = Buffer.alloc(4);
        word.writeUInt32LE(Number(token));
        answer.hash.update(word);
      }
      await onChunk(answer);
    }
    if (message.kind === "DONE") {
      if (message.seq !== answer.seq) throw new Error(`${message.seq} chunks sent, ${answer.seq} read`);
      if (message.text !== answer.text) throw new Error("the texts of the chunks are not the text of DONE");
      if (message.sha256 !== answer.hash.digest("hex")) throw new Error("the hash is not that of the ids");
      return { answer, last: message };
    }
  }
}

await send(HELLO, { versions: [1], client: "node example" });
const welcome = await receive();
print({ said: "welcome", version: welcome.version, boot_id: hex(welcome.boot_id), limits: welcome.limits });

const seed = 18446744073709551615n;
const first = await submit({ prompt: "the sky is blue", seed, max_tokens: 16 }, { h: { "x-team": "node" } });
const { answer, last } = await read(first);
print({ said: "streamed", outcome: last.outcome, text: last.text, chunks: answer.seq, tokens: answer.tokens,
        admitted_seed: first.seed, done_seed: last.seed, sha256: last.sha256 });
await send(ACK, { id: first.id });

const slow = { script: JSON.stringify({ tokens: 100000, token_s: 0.005 }) };
const second = await submit({ prompt: "for ever", max_tokens: 100000, metadata: slow });
const cancelled = await read(second, async ({ seq }) => {
  if (seq === 3) await send(CANCEL, { id: second.id });
});
print({ said: "cancelled", outcome: cancelled.last.outcome, tokens: cancelled.answer.tokens });

await send(SUBMIT, { id: randomBytes(16) }, { prompt: "Hi", max_tokens: 0 });
const refusal = await receive();
print({ said: "refused", code: refusal.code, field: refusal.field, retryable: refusal.retryable });

await send(BYE, {});
socket.close();
