import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import http2 from "node:http2";
import { CallError } from "./errors.js";
import { UploadRequestSchema } from "./messages/fedplat/wire/v1/fleet_pb.js";
import { ChunkSchema } from "./messages/fedplat/wire/v1/model_pb.js";
import { MAX_MESSAGE_BYTES, OCTETS, PROTO, REQUEST_HEADER, readWindow } from "./session.js";
import { fromBase64 } from "./signing.js";
import type { HttpRequest, HttpResponse, Transport } from "./transport.js";
import type { Ticket } from "./ticket.js";

/** The statuses of gRPC by number, as the Connect protocol names them. */
const STATUSES = (
  "ok canceled unknown invalid_argument deadline_exceeded not_found already_exists permission_denied " +
  "resource_exhausted failed_precondition aborted out_of_range unimplemented internal unavailable data_loss " +
  "unauthenticated"
).split(" ");
const HEAD_BYTES = 5;
const DATA_BYTES = 2 ** 20;
const WINDOW_BYTES = 2 ** 22;
const PING_MS = 10_000;
/** The headers of requests that gRPC has in another form. */
const REPLACED = new Set(["content-type", "connect-protocol-version", "connect-timeout-ms", REQUEST_HEADER]);

/**
 * Makes the same calls over gRPC, with the HTTP/2 of Node and one connection.
 *
 * The form of gRPC is that of https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
 */
export class GrpcTransport implements Transport {
  private connection: http2.ClientHttp2Session | undefined;
  private calls = 0;

  constructor(private readonly ticket: Ticket) {}

  async post(request: HttpRequest): Promise<HttpResponse> {
    const connection = this.connect();
    const stream = connection.request(toHeaders(request), { signal: request.signal });
    const answer = new Answer(stream);
    this.hold(connection, stream, request.signal);
    for (const message of toMessages(request)) stream.write(enclose(message));
    stream.end();
    const { status, type } = await answer.begin();
    if (status !== 200 || !type.startsWith("application/grpc")) {
      return { status, header: (name) => (name === "content-type" ? type : undefined), body: stream };
    }
    if (request.path.endsWith("/Download")) return respond(OCTETS, answer.files());
    const messages: Uint8Array[] = [];
    for await (const message of answer.messages()) messages.push(message);
    if (messages.length !== 1) throw new CallError("internal", `the answer has ${messages.length} messages; expected 1`);
    return respond(PROTO, messages);
  }

  /** Close the connection. */
  close(): void {
    this.connection?.destroy();
  }

  private connect(): http2.ClientHttp2Session {
    if (this.connection !== undefined && !this.connection.closed && !this.connection.destroyed) return this.connection;
    const { tls, server, ca } = this.ticket;
    const connection = http2.connect(`${tls ? "https" : "http"}://${server}`, {
      ca: ca || undefined,
      settings: { initialWindowSize: WINDOW_BYTES, enablePush: false },
    });
    const drop = () => {
      if (this.connection === connection) this.connection = undefined;
    };
    connection.on("connect", () => connection.setLocalWindowSize(WINDOW_BYTES));
    connection.on("error", drop);
    connection.on("goaway", drop);
    connection.on("close", drop);
    return (this.connection = connection);
  }

  /** Let the process end only between calls, and find out whether a connection is dead once a call got no answer. */
  private hold(connection: http2.ClientHttp2Session, stream: http2.ClientHttp2Stream, signal: AbortSignal): void {
    if (++this.calls === 1) connection.ref();
    stream.on("close", () => {
      if (--this.calls === 0) connection.unref();
      if (!signal.aborted || connection.destroyed) return;
      const timer = setTimeout(() => connection.destroy(), PING_MS).unref();
      if (!connection.ping(() => clearTimeout(timer))) clearTimeout(timer);
    });
  }
}

/** The answer to a call, as it arrives. */
class Answer {
  private headers: http2.IncomingHttpHeaders & { ":status"?: number } = {};
  private trailers: http2.IncomingHttpHeaders = {};
  private readonly started: Promise<void>;

  constructor(private readonly stream: http2.ClientHttp2Stream) {
    this.started = new Promise((resolve, reject) => {
      stream.on("response", (headers) => {
        this.headers = headers;
        resolve();
      });
      stream.on("trailers", (trailers) => (this.trailers = trailers));
      stream.on("error", reject);
      stream.on("close", () => reject(new Error("the connection was closed")));
    });
    this.started.catch(() => undefined); // `begin` waits for it later
  }

  /** Wait for the headers; return the status of HTTP, and the content type. */
  async begin(): Promise<{ status: number; type: string }> {
    await this.started;
    return { status: this.headers[":status"] ?? 0, type: this.headers["content-type"] ?? "" };
  }

  /** Return the octets of a file. */
  async *files(): AsyncGenerator<Uint8Array> {
    for await (const message of this.messages()) yield fromBinary(ChunkSchema, message).data;
  }

  /** Return the messages. Throws `CallError` if the call was refused, or the answer is incomplete. */
  async *messages(): AsyncGenerator<Uint8Array> {
    let parts: Buffer[] = [];
    let size = 0;
    let needed = HEAD_BYTES;
    for await (const part of this.stream as AsyncIterable<Buffer>) {
      parts.push(part);
      size += part.length;
      if (size < needed) continue;
      let rest: Buffer = Buffer.concat(parts);
      while (rest.length >= (needed = measure(rest))) {
        yield rest.subarray(HEAD_BYTES, needed);
        rest = rest.subarray(needed);
      }
      parts = [rest];
      size = rest.length;
    }
    const said = { ...this.headers, ...this.trailers };
    const status = STATUSES[Number(said["grpc-status"] ?? NaN)];
    if (status === undefined || (status === "ok" && size > 0)) {
      throw new CallError("unavailable", "the connection broke: the answer is incomplete");
    }
    if (status === "ok") return;
    const code = String(said["fedplat-code"] ?? "");
    const window = said["fedplat-retry-s"] === undefined ? undefined : String(said["fedplat-retry-s"]);
    throw new CallError(status, unescape(String(said["grpc-message"] ?? status)), code, readWindow(window));
  }
}

/** Return how many bytes a message and its head have, or at least have. */
function measure(bytes: Buffer): number {
  if (bytes.length < HEAD_BYTES) return HEAD_BYTES;
  const size = bytes.readUInt32BE(1);
  if (bytes[0] !== 0 || size > MAX_MESSAGE_BYTES) {
    throw new CallError("internal", `a message is compressed, or has more than ${MAX_MESSAGE_BYTES} bytes`);
  }
  return HEAD_BYTES + size;
}

function respond(type: string, parts: Iterable<Uint8Array> | AsyncIterable<Uint8Array>): HttpResponse {
  const body = (async function* () {
    yield* parts;
  })();
  return { status: 200, header: (name) => (name === "content-type" ? type : undefined), body };
}

function toHeaders({ path, headers }: HttpRequest): http2.OutgoingHttpHeaders {
  const kept = Object.entries(headers).filter(([name]) => !REPLACED.has(name));
  return {
    ":method": "POST",
    ":path": path,
    te: "trailers",
    "content-type": "application/grpc+proto",
    "grpc-timeout": `${headers["connect-timeout-ms"]}m`,
    ...Object.fromEntries(kept),
  };
}

function* toMessages({ headers, body }: HttpRequest): Generator<Uint8Array> {
  const first = headers[REQUEST_HEADER];
  if (first === undefined) {
    yield body;
    return;
  }
  yield fromBase64(first);
  for (let at = 0; at < body.length; at += DATA_BYTES) {
    const part = { case: "data" as const, value: body.subarray(at, at + DATA_BYTES) };
    yield toBinary(UploadRequestSchema, create(UploadRequestSchema, { part }));
  }
}

function enclose(message: Uint8Array): Buffer {
  const head = Buffer.alloc(HEAD_BYTES);
  head.writeUInt32BE(message.length, 1);
  return Buffer.concat([head, message]);
}

/** Return the text of a status, which is percent-encoded. */
function unescape(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
