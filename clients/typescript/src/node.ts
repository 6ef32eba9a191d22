import { createPrivateKey, createPublicKey, generateKeyPairSync, randomBytes, sign } from "node:crypto";
import { chmod, mkdir, open, readFile, rename } from "node:fs/promises";
import http from "node:http";
import https from "node:https";
import { join } from "node:path";
import { Client } from "./client.js";
import type { ClientParts } from "./client.js";
import { FedplatError } from "./errors.js";
import { GrpcTransport } from "./grpc.js";
import { parseTicket } from "./ticket.js";
import type { Ticket } from "./ticket.js";
import type { HttpRequest, HttpResponse, Identity, Store, Transport } from "./transport.js";

export { GrpcTransport } from "./grpc.js";
export * from "./index.js";

interface Kept {
  version: 1;
  server: string;
  population: string;
  tls: boolean;
  key: string;
  idempotency_key: string;
  client_id: string;
}

/** Keeps the identity in a folder of its own, which only its owner may read. */
export class FolderStore implements Store {
  private kept: Kept | undefined;
  private readonly path: string;

  constructor(
    private readonly folder: string,
    private readonly tls: boolean,
  ) {
    this.path = join(folder, "identity.json");
  }

  async open(server: string, population: string): Promise<Identity> {
    await mkdir(this.folder, { recursive: true, mode: 0o700 });
    await chmod(this.folder, 0o700);
    const kept = (this.kept = (await this.read()) ?? (await this.create(server, population)));
    if (kept.server !== server || kept.population !== population) {
      throw new FedplatError(
        `the folder ${this.folder} belongs to a client of ${kept.population} at ${kept.server}; use another folder`,
      );
    }
    if (kept.tls && !this.tls) {
      throw new FedplatError(
        `the ticket is without TLS, and this client has used TLS with ${server}; expected a ticket with TLS`,
      );
    }
    if (this.tls && !kept.tls) await this.write({ ...kept, tls: true });
    const key = createPrivateKey(kept.key);
    return {
      idempotencyKey: kept.idempotency_key,
      publicKey: new Uint8Array(createPublicKey(key).export({ type: "spki", format: "der" }).subarray(-32)),
      clientId: kept.client_id,
      sign: async (payload) => sign(null, payload, key),
    };
  }

  async saveClientId(clientId: string): Promise<void> {
    if (this.kept === undefined) throw new FedplatError("the store is not open");
    await this.write({ ...this.kept, client_id: clientId });
  }

  private async create(server: string, population: string): Promise<Kept> {
    const key = generateKeyPairSync("ed25519").privateKey.export({ type: "pkcs8", format: "pem" }) as string;
    const idempotency_key = randomBytes(16).toString("hex");
    const kept: Kept = { version: 1, server, population, tls: this.tls, key, idempotency_key, client_id: "" };
    await this.write(kept);
    return kept;
  }

  private async read(): Promise<Kept | undefined> {
    let text: string;
    try {
      text = await readFile(this.path, "utf8");
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === "ENOENT") return undefined;
      throw new FedplatError(`${this.path} cannot be read: ${(error as Error).message}; make it readable`);
    }
    try {
      const kept = JSON.parse(text) as Kept;
      if (kept.version === 1 && kept.key && kept.idempotency_key) return kept;
    } catch {
      // damaged, as below
    }
    throw new FedplatError(`${this.path} is damaged. Restore it from a backup, or delete it to enroll as a new client`);
  }

  /** Replace the file: after a crash it has either the old content or the new one. */
  private async write(kept: Kept): Promise<void> {
    const temporary = `${this.path}.${process.pid}.new`;
    const file = await open(temporary, "w", 0o600);
    try {
      await file.writeFile(JSON.stringify(kept, undefined, 1));
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(temporary, this.path);
    if (process.platform !== "win32") {
      const folder = await open(this.folder, "r");
      await folder.sync().finally(() => folder.close());
    }
    this.kept = kept;
  }
}

/** Makes requests with Node's own client, which trusts the authority of the ticket. */
export class NodeTransport implements Transport {
  private readonly agent: http.Agent;
  private readonly base: URL;

  constructor(private readonly ticket: Ticket) {
    const options = { keepAlive: true, maxSockets: 4 };
    this.agent = ticket.tls ? new https.Agent({ ...options, ca: ticket.ca || undefined }) : new http.Agent(options);
    this.base = new URL(`${ticket.tls ? "https" : "http"}://${ticket.http || ticket.server}`);
  }

  post({ path, headers, body, signal }: HttpRequest): Promise<HttpResponse> {
    return new Promise((resolve, reject) => {
      const request = (this.ticket.tls ? https : http).request(new URL(path, this.base), {
        method: "POST",
        agent: this.agent,
        headers: { ...headers, "content-length": body.length },
        signal,
      });
      request.on("response", (response) => {
        resolve({
          status: response.statusCode ?? 0,
          header: (name) => [response.headers[name]].flat()[0],
          body: response,
        });
      });
      request.on("error", reject);
      request.end(body);
    });
  }

  /** Close the connections that are kept. */
  close(): void {
    this.agent.destroy();
  }
}

/** The options of a client on Node: `folder` keeps its identity. */
export interface NodeOptions extends Pick<ClientParts, "labels" | "maxModelBytes" | "log"> {
  folder: string;
  ticket: string;
  /** HTTP/1.1, which is the default, or gRPC. */
  transport?: "http" | "grpc";
}

/** Return a client that keeps its identity in a folder. */
export function openClient({ folder, ticket, transport = "http", ...options }: NodeOptions): Client {
  if (transport !== "http" && transport !== "grpc") {
    throw new FedplatError(`there is no transport ${JSON.stringify(transport)}; expected "http" or "grpc"`);
  }
  const parsed = parseTicket(ticket);
  const store = new FolderStore(folder, parsed.tls);
  const calls = transport === "grpc" ? new GrpcTransport(parsed) : new NodeTransport(parsed);
  return new Client({ ticket: parsed, store, transport: calls, ...options });
}
