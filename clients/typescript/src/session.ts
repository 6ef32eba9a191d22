import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { DescMessage, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import { CallError, FinalError, StoppedError } from "./errors.js";
import type { RetryWindow } from "./errors.js";
import * as fleet from "./messages/fedplat/wire/v1/fleet_pb.js";
import { callPayload, proofPayload, toBase64 } from "./signing.js";
import type { Bytes } from "./signing.js";
import type { HttpResponse, Identity, Store, Transport } from "./transport.js";
import type { Ticket } from "./ticket.js";

export const PROTOCOL_VERSION = 1;
export const SOFTWARE_VERSION = "typescript 0.2.0";
const SERVICE = "/fedplat.wire.v1.Fleet/";
export const PROTO = "application/proto";
export const OCTETS = "application/octet-stream";
/** The header with the first message of an upload, in base64. */
export const REQUEST_HEADER = "fedplat-request-bin";
const CALL_S = 30;
const MAX_TRIES = 3;
export const MAX_MESSAGE_BYTES = 8 * 2 ** 20;
const PIECE_BYTES = 8 * 2 ** 20;
const SMALL_PIECE_BYTES = 512 * 2 ** 10;
const TOO_LARGE = 413;

interface Signed {
  session: string;
  headers: Record<string, string>;
}

/** The calls of one client, which it signs in a session that it opens by itself. */
export class Session {
  private session = "";
  private counter = 0n;
  private opening: Promise<string> | undefined;
  private pieceBytes = PIECE_BYTES;
  clientId: string;

  constructor(
    private readonly transport: Transport,
    private readonly store: Store,
    private readonly identity: Identity,
    private readonly ticket: Ticket,
  ) {
    this.clientId = identity.clientId;
  }

  /** Enroll, unless the client has enrolled already. */
  async enroll(labels: Record<string, string>, signal: AbortSignal): Promise<void> {
    if (this.clientId) return;
    const response = await this.prove(
      "Enroll",
      fleet.EnrollRequestSchema,
      {
        population: this.ticket.population,
        labels,
        idempotencyKey: this.identity.idempotencyKey,
        protocolVersion: PROTOCOL_VERSION,
        softwareVersion: SOFTWARE_VERSION,
        token: this.ticket.secret,
        publicKey: this.identity.publicKey,
      },
      fleet.EnrollResponseSchema,
      signal,
    );
    await this.store.saveClientId(response.clientId);
    this.clientId = response.clientId;
  }

  /** Make the next `enroll` enroll again, with the same keys. */
  async forgetEnrollment(): Promise<void> {
    await this.store.saveClientId("");
    this.clientId = "";
    this.session = "";
  }

  /** Make a call; one whose session is lost is made again in another session. */
  async call<I extends DescMessage, O extends DescMessage>(
    method: string,
    input: I,
    init: MessageInitShape<I>,
    output: O,
    signal: AbortSignal,
    timeoutS = CALL_S,
  ): Promise<MessageShape<O>> {
    const request = toBinary(input, create(input, init)) as Bytes;
    for (let number = 1; ; number++) {
      const signed = await this.sign(method, request, signal);
      try {
        return await this.unary(method, request, signed.headers, output, signal, timeoutS);
      } catch (error) {
        if (!this.mayTryAgain(error, signed) || number === MAX_TRIES) throw error;
      }
    }
  }

  /** Receive a file from an offset on. */
  async *download(digest: string, offset: number, signal: AbortSignal, timeoutS: number): AsyncGenerator<Uint8Array> {
    const init = { digest, offset: BigInt(offset) };
    const request = toBinary(fleet.DownloadRequestSchema, create(fleet.DownloadRequestSchema, init)) as Bytes;
    const signed = await this.sign("Download", request, signal);
    try {
      const response = await this.post("Download", PROTO, request, signed.headers, signal, timeoutS);
      for await (const part of response.body) yield part;
    } catch (error) {
      throw this.resumable(error, signed, signal);
    }
  }

  /** Send a piece of an update from an offset on; return how many bytes the server now has. */
  async upload(
    token: string,
    digest: string,
    update: Bytes,
    offset: number,
    signal: AbortSignal,
    timeoutS: number,
  ): Promise<number> {
    const header = { token, digest, sizeBytes: BigInt(update.length), offset: BigInt(offset) };
    const request = create(fleet.UploadRequestSchema, { part: { case: "header", value: header } });
    const first = toBinary(fleet.UploadRequestSchema, request) as Bytes;
    const signed = await this.sign("Upload", first, signal);
    const body = update.subarray(offset, offset + this.pieceBytes);
    try {
      const headers = { ...signed.headers, [REQUEST_HEADER]: toBase64(first) };
      const response = await this.post("Upload", OCTETS, body, headers, signal, timeoutS);
      return Number(fromBinary(fleet.UploadResponseSchema, await readAll(response)).receivedBytes);
    } catch (error) {
      if (error instanceof CallError && error.httpStatus === TOO_LARGE) this.pieceBytes = SMALL_PIECE_BYTES;
      throw this.resumable(error, signed, signal);
    }
  }

  private async prove<I extends DescMessage, O extends DescMessage>(
    method: string,
    input: I,
    init: MessageInitShape<I>,
    output: O,
    signal: AbortSignal,
  ): Promise<MessageShape<O>> {
    const asked = create(fleet.GetChallengeRequestSchema, { protocolVersion: PROTOCOL_VERSION });
    const challenge = toBinary(fleet.GetChallengeRequestSchema, asked) as Bytes;
    const { nonce } = await this.unary(
      "GetChallenge",
      challenge,
      {},
      fleet.GetChallengeResponseSchema,
      signal,
      CALL_S,
    );
    const request = toBinary(input, create(input, init)) as Bytes;
    const signature = await this.identity.sign(await proofPayload(SERVICE + method, nonce, request));
    const headers = { "fedplat-nonce-bin": toBase64(nonce), "fedplat-signature-bin": toBase64(signature) };
    return this.unary(method, request, headers, output, signal, CALL_S);
  }

  private async sign(method: string, request: Bytes, signal: AbortSignal): Promise<Signed> {
    if (!this.session) {
      // Several calls may wait for it, so it does not end with the signal of one of them.
      const never = new AbortController().signal;
      this.opening ??= this.openSession(never).finally(() => (this.opening = undefined));
      await untilAborted(this.opening, signal);
    }
    const session = this.session;
    const counter = ++this.counter;
    const signature = await this.identity.sign(await callPayload(SERVICE + method, session, counter, request));
    return {
      session,
      headers: {
        "fedplat-session": session,
        "fedplat-counter": String(counter),
        "fedplat-signature-bin": toBase64(signature),
      },
    };
  }

  private async openSession(signal: AbortSignal): Promise<string> {
    const init = { clientId: this.clientId, protocolVersion: PROTOCOL_VERSION };
    const output = fleet.OpenSessionResponseSchema;
    const { sessionId } = await this.prove("OpenSession", fleet.OpenSessionRequestSchema, init, output, signal);
    this.counter = 0n;
    this.session = sessionId;
    return sessionId;
  }

  /** Whether a call may be made again at once, in another session. */
  private mayTryAgain(error: unknown, signed: Signed): boolean {
    if (!(error instanceof CallError)) return false;
    if (error.remedy === "reopen") {
      if (this.session === signed.session) this.session = "";
      return true;
    }
    // FENCED does not mean a rival if this client has opened a newer session while the call was in flight.
    return error.code === "FENCED" && this.session !== signed.session;
  }

  /** Return the error of a transfer; one that was lost with its session may be resumed. */
  private resumable(error: unknown, signed: Signed, signal: AbortSignal): unknown {
    if (this.mayTryAgain(error, signed)) return new CallError("unavailable", String(error));
    if (error instanceof CallError || error instanceof FinalError || error instanceof StoppedError) return error;
    signal.throwIfAborted();
    return new CallError("unavailable", `the connection broke: ${describe(error)}`);
  }

  private async unary<O extends DescMessage>(
    method: string,
    request: Bytes,
    headers: Record<string, string>,
    output: O,
    signal: AbortSignal,
    timeoutS: number,
  ): Promise<MessageShape<O>> {
    const response = await this.post(method, PROTO, request, headers, signal, timeoutS);
    let body: Uint8Array;
    try {
      body = await readAll(response);
    } catch (error) {
      if (error instanceof CallError) throw error;
      signal.throwIfAborted();
      throw new CallError("unavailable", `the connection broke: ${describe(error)}`);
    }
    try {
      return fromBinary(output, body);
    } catch {
      throw new CallError("internal", `the response to ${method} is not a message of the protocol`);
    }
  }

  private async post(
    method: string,
    contentType: string,
    body: Bytes,
    headers: Record<string, string>,
    signal: AbortSignal,
    timeoutS: number,
  ): Promise<HttpResponse> {
    signal.throwIfAborted();
    const timeoutMs = Math.max(1, Math.round(Math.min(timeoutS, 86_400) * 1000));
    const ended = AbortSignal.any([signal, AbortSignal.timeout(timeoutMs)]);
    const all = {
      ...headers,
      "content-type": contentType,
      "connect-protocol-version": "1",
      "connect-timeout-ms": String(timeoutMs),
    };
    let response: HttpResponse;
    try {
      response = await this.transport.post({ path: SERVICE + method, headers: all, body, signal: ended });
    } catch (error) {
      if (error instanceof CallError) throw error;
      signal.throwIfAborted();
      throw new CallError("unavailable", `the server does not answer: ${describe(error)}`);
    }
    const found = response.header("content-type")?.split(";")[0]?.trim().toLowerCase();
    if (response.status === 200 && (found === PROTO || found === OCTETS)) return response;
    throw await readRefusal(response, found);
  }
}

async function untilAborted(promise: Promise<unknown>, signal: AbortSignal): Promise<void> {
  promise.catch(() => undefined); // it may fail after this has ended
  let onAbort: () => void = () => undefined;
  const aborted = new Promise<never>((_, reject) => {
    onAbort = () => reject(signal.reason);
    signal.addEventListener("abort", onAbort);
  });
  try {
    signal.throwIfAborted();
    await Promise.race([promise, aborted]);
  } finally {
    signal.removeEventListener("abort", onAbort);
  }
}

function describe(error: unknown): string {
  const cause = error instanceof Error ? error.cause : undefined;
  return cause instanceof Error ? cause.message : error instanceof Error ? error.message : String(error);
}

async function readAll(response: HttpResponse): Promise<Bytes> {
  const parts: Uint8Array[] = [];
  let size = 0;
  for await (const part of response.body) {
    parts.push(part);
    size += part.length;
    if (size > MAX_MESSAGE_BYTES) {
      throw new CallError("resource_exhausted", `the response has more than ${MAX_MESSAGE_BYTES} bytes`);
    }
  }
  const whole = new Uint8Array(size);
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

async function readRefusal(response: HttpResponse, contentType: string | undefined): Promise<CallError> {
  const text = new TextDecoder().decode(await readAll(response).catch(() => new Uint8Array()));
  const code = response.header("trailer-fedplat-code") ?? "";
  const retry = readWindow(response.header("trailer-fedplat-retry-s"));
  if (response.status !== 200 && contentType === "application/json") {
    try {
      const said = JSON.parse(text) as { code: string; message?: string };
      if (typeof said.code === "string") {
        return new CallError(said.code, said.message ?? said.code, code, retry, response.status);
      }
    } catch {
      // something in between has answered
    }
  }
  const shown = text.slice(0, 4096).replace(/<(script|style)[^]*?<\/\1>|<[^>]*>|\s+/g, " ").replace(/ +/g, " ").trim();
  const said =
    `what answers there is not the server: the HTTP status ${response.status}, ${shown.slice(0, 80)}; ` +
    "check the address, and the proxies before the server";
  return new CallError("unavailable", said, "", retry, response.status);
}

export function readWindow(text: string | undefined): RetryWindow | undefined {
  const [minS, maxS] = (text ?? "").split(" ").map(Number);
  return text !== undefined && Number.isFinite(minS) && Number.isFinite(maxS)
    ? { minS: minS!, maxS: maxS! }
    : undefined;
}

