import { fromBase64 } from "./signing.js";
import { FedplatError } from "./errors.js";

/** What an operator gives to a new client: where the server is, and the secret with which it enrolls. */
export interface Ticket {
  server: string;
  population: string;
  secret: string;
  tls: boolean;
  /** Certificates (PEM) of the authorities to trust; empty: those of the platform. */
  ca: string;
  /** The address for HTTP/1.1; empty: try `server`. */
  http: string;
}

const MAX_LENGTH = 32_768;
const MAX_DEPTH = 16;
const ADDRESS = /^(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/[\]]+):([0-9]{1,5})$/;
const FIELDS = ["server", "population", "secret", "tls", "ca"] as const;

/** Read a ticket. The message of an error does not show the line, which is secret. */
export function parseTicket(line: string): Ticket {
  const text = line.trim();
  const version = /^fpt([12])\./.exec(text)?.[1];
  if (text.length > MAX_LENGTH) {
    throw new FedplatError(`the ticket has ${text.length} characters; expected at most ${MAX_LENGTH}`);
  }
  if (version === undefined) {
    throw new FedplatError(
      "this is not a ticket of this version: expected one line that begins with fpt1. or fpt2.; " +
        "an operator makes one with: fedplat enrollment create",
    );
  }
  const ticket = decode(text.slice(5), version === "2");
  if (ticket === undefined) {
    throw new FedplatError("the ticket is damaged: copy the whole line again, or ask for another one");
  }
  if (!(ticket.server && ticket.population && ticket.secret)) {
    throw new FedplatError("the ticket is incomplete: ask for another one");
  }
  if (!isAddress(ticket.server) || (ticket.http !== "" && !isAddress(ticket.http))) {
    throw new FedplatError("the ticket's address has no port; ask for a ticket with host:port");
  }
  return ticket;
}

function isAddress(text: string): boolean {
  const port = Number(ADDRESS.exec(text)?.[3]);
  return port >= 1 && port <= 65535;
}

function decode(body: string, isMap: boolean): Ticket | undefined {
  const found = new Map<string, unknown>();
  try {
    const content = new Reader(fromBase64(body, true)).readAll();
    if (isMap && content instanceof Map) {
      for (const [name, value] of content) found.set(String(name), value);
    } else if (!isMap && Array.isArray(content) && content.length >= 3 && content.length <= FIELDS.length) {
      content.forEach((value, index) => found.set(FIELDS[index]!, value));
    } else {
      return undefined;
    }
  } catch {
    return undefined;
  }
  const ticket = { server: "", population: "", secret: "", tls: false, ca: "", http: "" };
  for (const [name, value] of found) {
    if (!(name in ticket)) continue;
    if (typeof value !== typeof ticket[name as keyof Ticket]) return undefined;
    Object.assign(ticket, { [name]: value });
  }
  return ticket;
}

/** Reads MessagePack (https://github.com/msgpack/msgpack/blob/master/spec.md). */
class Reader {
  private at = 0;
  private readonly view: DataView;

  constructor(private readonly bytes: Uint8Array) {
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  readAll(): unknown {
    const value = this.read(0);
    if (this.at !== this.bytes.length) throw new RangeError("more bytes follow");
    return value;
  }

  private read(depth: number): unknown {
    if (depth > MAX_DEPTH) throw new RangeError("too deep");
    const tag = this.view.getUint8(this.at++);
    if (tag < 0x80) return tag;
    if (tag >= 0xe0) return tag - 0x100;
    if (tag < 0x90) return this.readMap(tag & 0x0f, depth);
    if (tag < 0xa0) return this.readArray(tag & 0x0f, depth);
    if (tag < 0xc0) return this.readText(tag & 0x1f);
    switch (tag) {
      case 0xc0:
        return null;
      case 0xc2:
        return false;
      case 0xc3:
        return true;
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return this.take(this.size(1 << (tag - 0xc4)));
      case 0xca:
        return this.skip(4, (at) => this.view.getFloat32(at));
      case 0xcb:
        return this.skip(8, (at) => this.view.getFloat64(at));
      case 0xcc:
      case 0xcd:
      case 0xce:
        return this.size(1 << (tag - 0xcc));
      case 0xcf:
        return this.skip(8, (at) => this.view.getBigUint64(at));
      case 0xd0:
        return this.skip(1, (at) => this.view.getInt8(at));
      case 0xd1:
        return this.skip(2, (at) => this.view.getInt16(at));
      case 0xd2:
        return this.skip(4, (at) => this.view.getInt32(at));
      case 0xd3:
        return this.skip(8, (at) => this.view.getBigInt64(at));
      case 0xd9:
      case 0xda:
      case 0xdb:
        return this.readText(this.size(1 << (tag - 0xd9)));
      case 0xdc:
      case 0xdd:
        return this.readArray(this.size(2 << (tag - 0xdc)), depth);
      case 0xde:
      case 0xdf:
        return this.readMap(this.size(2 << (tag - 0xde)), depth);
      default:
        throw new RangeError("an unknown type");
    }
  }

  private skip<T>(size: number, read: (at: number) => T): T {
    const at = this.at;
    this.at += size;
    return read(at);
  }

  private size(numBytes: number): number {
    return this.skip(numBytes, (at) =>
      numBytes === 1 ? this.view.getUint8(at) : numBytes === 2 ? this.view.getUint16(at) : this.view.getUint32(at),
    );
  }

  private take(size: number): Uint8Array {
    const part = this.bytes.subarray(this.at, this.at + size);
    if (part.length !== size) throw new RangeError("the end");
    this.at += size;
    return part;
  }

  private readText(size: number): string {
    return new TextDecoder("utf-8", { fatal: true }).decode(this.take(size));
  }

  private readArray(count: number, depth: number): unknown[] {
    const found: unknown[] = [];
    for (let index = 0; index < count; index++) found.push(this.read(depth + 1));
    return found;
  }

  private readMap(count: number, depth: number): Map<unknown, unknown> {
    const found = new Map<unknown, unknown>();
    for (let index = 0; index < count; index++) {
      const key = this.read(depth + 1);
      found.set(key, this.read(depth + 1));
    }
    return found;
  }
}
