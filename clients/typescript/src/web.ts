import { Client } from "./client.js";
import type { ClientParts } from "./client.js";
import { FedplatError } from "./errors.js";
import { toHex } from "./signing.js";
import { parseTicket } from "./ticket.js";
import type { Ticket } from "./ticket.js";
import type { HttpRequest, HttpResponse, Identity, Store, Transport } from "./transport.js";

export * from "./index.js";

interface Kept {
  keys: CryptoKeyPair;
  idempotencyKey: string;
  clientId: string;
}

/** Keeps the identity in the browser's database; the private key cannot be read, only used. */
export class BrowserStore implements Store {
  private kept: Kept | undefined;
  private name = "";

  constructor(private readonly database = "fedplat") {}

  async open(server: string, population: string): Promise<Identity> {
    this.name = JSON.stringify([server, population]);
    const found = await this.transact<Kept | undefined>("readonly", (table) => table.get(this.name));
    const kept = (this.kept = found ?? (await this.create()));
    return {
      idempotencyKey: kept.idempotencyKey,
      publicKey: new Uint8Array(await crypto.subtle.exportKey("raw", kept.keys.publicKey)),
      clientId: kept.clientId,
      sign: async (payload) => new Uint8Array(await crypto.subtle.sign("Ed25519", kept.keys.privateKey, payload)),
    };
  }

  async saveClientId(clientId: string): Promise<void> {
    if (this.kept === undefined) throw new FedplatError("the store is not open");
    await this.save({ ...this.kept, clientId });
  }

  private async create(): Promise<Kept> {
    const keys = (await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"])) as CryptoKeyPair;
    const idempotencyKey = toHex(crypto.getRandomValues(new Uint8Array(16)));
    const kept = { keys, idempotencyKey, clientId: "" };
    await this.save(kept);
    return kept;
  }

  private async save(kept: Kept): Promise<void> {
    await this.transact("readwrite", (table) => table.put(kept, this.name));
    this.kept = kept;
  }

  private transact<T>(mode: IDBTransactionMode, act: (table: IDBObjectStore) => IDBRequest): Promise<T> {
    return new Promise((resolve, reject) => {
      const opening = indexedDB.open(this.database, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore("identities");
      opening.onerror = () => reject(opening.error);
      opening.onsuccess = () => {
        const database = opening.result;
        const transaction = database.transaction("identities", mode, { durability: "strict" });
        const request = act(transaction.objectStore("identities"));
        transaction.oncomplete = () => {
          database.close();
          resolve(request.result as T);
        };
        transaction.onabort = () => {
          database.close();
          reject(transaction.error);
        };
      };
    });
  }
}

/** Makes requests with the browser, which trusts the authorities of its platform, and not that of the ticket. */
export class FetchTransport implements Transport {
  private readonly base: string;

  constructor(ticket: Ticket) {
    this.base = `${ticket.tls ? "https" : "http"}://${ticket.http || ticket.server}`;
  }

  async post({ path, headers, body, signal }: HttpRequest): Promise<HttpResponse> {
    const response = await fetch(this.base + path, {
      method: "POST",
      headers,
      body,
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
    return {
      status: response.status,
      header: (name) => response.headers.get(name) ?? undefined,
      body: read(response),
    };
  }
}

/** Safari has no asynchronous iteration of streams. */
async function* read(response: Response): AsyncGenerator<Uint8Array> {
  const reader = response.body?.getReader();
  if (reader === undefined) return;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.releaseLock();
  }
}

/** The options of a client in a browser. */
export interface WebOptions extends Pick<ClientParts, "labels" | "maxModelBytes" | "log"> {
  ticket: string;
  store?: Store;
}

/** Return a client that keeps its identity in the browser's database. */
export function openClient({ ticket, store, ...options }: WebOptions): Client {
  const parsed = parseTicket(ticket);
  const transport = new FetchTransport(parsed);
  return new Client({ ticket: parsed, store: store ?? new BrowserStore(), transport, ...options });
}
