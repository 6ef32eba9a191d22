/** Bytes of an ordinary buffer, as WebCrypto and fetch take them. */
export type Bytes = Uint8Array<ArrayBuffer>;

const encoder = new TextEncoder();

/** Return the bytes that prove possession of a key: over a nonce of the server and the serialized request. */
export async function proofPayload(path: string, nonce: Uint8Array, request: Uint8Array): Promise<Bytes> {
  return joinParts([encoder.encode("fedplat proof 1"), encoder.encode(path), nonce, await sha256(request)]);
}

/** Return the bytes that a call within a session signs; for an upload, `request` is its first message. */
export async function callPayload(
  path: string,
  session: string,
  counter: bigint,
  request: Uint8Array,
): Promise<Bytes> {
  const number = new Uint8Array(8);
  new DataView(number.buffer).setBigUint64(0, counter);
  return joinParts([
    encoder.encode("fedplat call 1"),
    encoder.encode(path),
    encoder.encode(session),
    number,
    await sha256(request),
  ]);
}

function joinParts(parts: Uint8Array[]): Bytes {
  const joined = new Uint8Array(parts.reduce((size, part) => size + 4 + part.length, 0));
  const view = new DataView(joined.buffer);
  let at = 0;
  for (const part of parts) {
    view.setUint32(at, part.length);
    joined.set(part, at + 4);
    at += 4 + part.length;
  }
  return joined;
}

export async function sha256(data: Uint8Array): Promise<Bytes> {
  return new Uint8Array(await crypto.subtle.digest("SHA-256", data as Bytes));
}

export function toHex(data: Uint8Array): string {
  return Array.from(data, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function toBase64(data: Uint8Array): string {
  let text = "";
  for (const byte of data) text += String.fromCharCode(byte);
  return btoa(text);
}

/** Decode base64, or base64url, with or without padding. Throws an error for other text. */
export function fromBase64(text: string, isUrl = false): Bytes {
  const standard = isUrl ? text.replace(/-/g, "+").replace(/_/g, "/") : text;
  return Uint8Array.from(atob(standard), (character) => character.charCodeAt(0));
}
