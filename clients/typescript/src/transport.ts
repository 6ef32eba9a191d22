import type { Bytes } from "./signing.js";

/** A request of HTTP to a path of the server. */
export interface HttpRequest {
  path: string;
  headers: Record<string, string>;
  body: Bytes;
  /** Ends the request, with an error. */
  signal: AbortSignal;
}

/** Its response; reading `body` throws if the response is incomplete. */
export interface HttpResponse {
  status: number;
  header(name: string): string | undefined;
  body: AsyncIterable<Uint8Array>;
}

/** A way to make requests to one server. Throws any error if there is no response. */
export interface Transport {
  post(request: HttpRequest): Promise<HttpResponse>;
}

/** What a client keeps: its key, which is there before its first call, and the id that the server gives it. */
export interface Identity {
  readonly idempotencyKey: string;
  /** An Ed25519 key, 32 bytes. */
  readonly publicKey: Bytes;
  /** Empty before the enrollment. */
  readonly clientId: string;
  sign(payload: Bytes): Promise<Uint8Array>;
}

/** Where a client keeps its identity. */
export interface Store {
  /** Return the identity; the first time, create and keep a new one. */
  open(server: string, population: string): Promise<Identity>;
  /** Keep the id of the client, before this returns. */
  saveClientId(clientId: string): Promise<void>;
}
