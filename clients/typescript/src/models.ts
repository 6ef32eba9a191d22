import { FedplatError } from "./errors.js";

/** The values of a tensor; those of `BF16` and `F16` are a `Float32Array`, which is rounded when it is sent. */
export type Values =
  | Float64Array
  | Float32Array
  | BigInt64Array
  | BigUint64Array
  | Int32Array
  | Uint32Array
  | Int16Array
  | Uint16Array
  | Int8Array
  | Uint8Array;

export interface Tensor {
  readonly name: string;
  /** The type by its name in safetensors, such as `F32`. */
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly values: Values;
}

/** A model by the names of its tensors, in the order of its file. */
export type Model = Map<string, Tensor>;

interface Place {
  name: string;
  dtype: string;
  shape: number[];
  start: number;
  stop: number;
  /** The position of its entry in the header, which orders empty tensors. */
  at: number;
}

interface Layout {
  header: Uint8Array;
  carry: string;
  places: Place[];
}

const SIZES: Record<string, number> = {
  F64: 8,
  I64: 8,
  U64: 8,
  F32: 4,
  I32: 4,
  U32: 4,
  BF16: 2,
  F16: 2,
  I16: 2,
  U16: 2,
  BOOL: 1,
  I8: 1,
  U8: 1,
};
const MAX_HEADER_BYTES = 16 * 2 ** 20;
const SERVER = "server/";
const METADATA = "__metadata__";
const CARRY = "fedplat.carry";

/** Read a model's file. Throws `FedplatError` for bytes that are not one. */
export function readModel(file: Uint8Array): Model {
  const { header, places } = readLayout(file);
  const model: Model = new Map();
  for (const { name, dtype, shape, start, stop } of places) {
    const values = readValues(dtype, file.slice(header.length + start, header.length + stop).buffer);
    model.set(name, { name, dtype, shape, values });
  }
  return model;
}

/** Return the file of the update from a model's file to the trained values, without the tensors of the server. */
export function makeUpdate(base: Uint8Array, trained: ReadonlyMap<string, Values>): Uint8Array<ArrayBuffer> {
  const layout = readLayout(base);
  const sent = layout.places.filter((place) => !place.name.startsWith(SERVER));
  const header = sent.length === layout.places.length ? layout.header : writeHeader(layout.carry, sent);
  const size = sent.reduce((sum, place) => sum + place.stop - place.start, 0);
  const update = new Uint8Array(header.length + size);
  update.set(header);
  let at = header.length;
  for (const place of sent) {
    const content = base.slice(layout.header.length + place.start, layout.header.length + place.stop).buffer;
    const before = readValues(place.dtype, content);
    const after = trained.get(place.name);
    if (after === undefined || after.length !== before.length || after.constructor !== before.constructor) {
      throw new FedplatError(
        `the trained tensor ${JSON.stringify(place.name)} is ${describe(after)}; expected ${describe(before)}`,
      );
    }
    update.set(subtract(place.dtype, after, before), at);
    at += place.stop - place.start;
  }
  return update;
}

function describe(values: Values | undefined): string {
  return values === undefined ? "missing" : `a ${values.constructor.name} of ${values.length} entries`;
}

function subtract(dtype: string, after: Values, before: Values): Uint8Array {
  if (after instanceof Float64Array || after instanceof Float32Array) {
    const rounded = dtype === "BF16" || dtype === "F16" ? fromHalf(dtype, toHalf(dtype, after)) : after;
    const difference = after instanceof Float64Array ? new Float64Array(after.length) : new Float32Array(after.length);
    for (let index = 0; index < after.length; index++) {
      difference[index] = (rounded[index] as number) - (before[index] as number);
      if (!Number.isFinite(difference[index])) {
        throw new FedplatError("the update has an entry that is not finite: the training has diverged");
      }
    }
    return bytesOf(dtype === "BF16" || dtype === "F16" ? toHalf(dtype, difference) : difference);
  }
  return bytesOf(after);
}

function bytesOf(values: Values): Uint8Array {
  return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
}

/** All machines that run Node or a browser are little-endian, as the file is. */
function readValues(dtype: string, content: ArrayBuffer): Values {
  switch (dtype) {
    case "F64":
      return new Float64Array(content);
    case "F32":
      return new Float32Array(content);
    case "BF16":
    case "F16":
      return fromHalf(dtype, new Uint16Array(content));
    case "I64":
      return new BigInt64Array(content);
    case "U64":
      return new BigUint64Array(content);
    case "I32":
      return new Int32Array(content);
    case "U32":
      return new Uint32Array(content);
    case "I16":
      return new Int16Array(content);
    case "U16":
      return new Uint16Array(content);
    case "I8":
      return new Int8Array(content);
    default:
      return new Uint8Array(content);
  }
}

const scratch = new Float32Array(1);
const scratchBits = new Uint32Array(scratch.buffer);

function fromHalf(dtype: string, bits: Uint16Array): Float32Array {
  const values = new Float32Array(bits.length);
  for (let index = 0; index < bits.length; index++) {
    const half = bits[index]!;
    if (dtype === "BF16") {
      scratchBits[0] = half << 16;
      values[index] = scratch[0]!;
      continue;
    }
    const sign = half & 0x8000 ? -1 : 1;
    const exponent = (half >> 10) & 0x1f;
    const fraction = half & 0x3ff;
    if (exponent === 0) values[index] = sign * fraction * 2 ** -24;
    else if (exponent === 31) values[index] = fraction ? NaN : sign * Infinity;
    else values[index] = sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return values;
}

/** Round to the nearest number of the type, ties to even. */
function toHalf(dtype: string, values: ArrayLike<number>): Uint16Array {
  const bits = new Uint16Array(values.length);
  for (let index = 0; index < values.length; index++) {
    scratch[0] = values[index]!;
    const word = scratchBits[0]!;
    bits[index] = dtype === "BF16" ? roundBrain(word) : roundHalf(word);
  }
  return bits;
}

function roundBrain(word: number): number {
  if ((word & 0x7fffffff) > 0x7f800000) return (word >>> 16) | 0x40;
  return (word + 0x7fff + ((word >>> 16) & 1)) >>> 16;
}

function roundHalf(word: number): number {
  const sign = (word >>> 16) & 0x8000;
  const size = word & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7e00;
  if (size >= 0x477ff000) return sign | 0x7c00;
  if (size >= 0x38800000) {
    const shifted = size - 0x38000000;
    return sign | ((shifted + 0xfff + ((shifted >>> 13) & 1)) >>> 13);
  }
  if (size < 0x33000000) return sign;
  const shift = 126 - (size >>> 23);
  const fraction = (size & 0x7fffff) | 0x800000;
  const kept = fraction >>> shift;
  const rest = fraction & ((1 << shift) - 1);
  const half = 1 << (shift - 1);
  return sign | (kept + (rest > half || (rest === half && kept & 1) ? 1 : 0));
}

function readLayout(file: Uint8Array): Layout {
  if (file.length < 8) throw new FedplatError("the file is too short to be a safetensors file");
  const size = Number(new DataView(file.buffer, file.byteOffset, 8).getBigUint64(0, true));
  if (size > MAX_HEADER_BYTES || 8 + size > file.length) {
    throw new FedplatError(`the header claims ${size} bytes; the file has ${file.length - 8} after its prefix`);
  }
  const { carry, places } = readHeader(file.subarray(8, 8 + size));
  places.sort((one, other) => one.start - other.start || one.stop - other.stop || one.at - other.at);
  let end = 0;
  for (const { name, dtype, shape, start, stop } of places) {
    const count = shape.reduce((product, extent) => product * extent, 1);
    if (start !== end || stop - start !== count * SIZES[dtype]!) {
      throw new FedplatError(`the tensor ${JSON.stringify(name)} claims the bytes ${start} to ${stop}`);
    }
    end = stop;
  }
  if (end !== file.length - 8 - size) {
    throw new FedplatError(`the tensors fill ${end} bytes; the file has ${file.length - 8 - size}`);
  }
  return { header: file.subarray(0, 8 + size), carry, places };
}

function readHeader(bytes: Uint8Array): { carry: string; places: Place[] } {
  let text: string;
  let content: Record<string, unknown>;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    content = JSON.parse(text) as Record<string, unknown>;
  } catch {
    throw new FedplatError("the safetensors header cannot be read; expected one JSON object of names");
  }
  if (typeof content !== "object" || content === null || Array.isArray(content)) {
    throw new FedplatError("the safetensors header cannot be read; expected one JSON object of names");
  }
  const order = listKeys(text);
  const metadata = (content[METADATA] ?? {}) as Record<string, unknown>;
  const carry = metadata[CARRY] ?? "keep";
  if (carry !== "keep" && carry !== "max") throw new FedplatError("the carry rule is unknown; expected keep or max");
  const places: Place[] = [];
  order.forEach((name, at) => {
    if (name !== METADATA) places.push(readPlace(name, content[name], at));
  });
  return { carry, places };
}

function readPlace(name: string, entry: unknown, at: number): Place {
  const { dtype, shape, data_offsets: offsets, ...rest } = Object(entry) as Record<string, unknown>;
  const isRight =
    typeof dtype === "string" &&
    Object.hasOwn(SIZES, dtype) &&
    areNumbers(shape) &&
    areNumbers(offsets) &&
    offsets.length === 2 &&
    Object.keys(rest).length === 0;
  if (!isRight) {
    throw new FedplatError(
      `the entry of the tensor ${JSON.stringify(name)} cannot be read; expected a known dtype, a shape and two offsets`,
    );
  }
  return { name, dtype, shape, start: offsets[0]!, stop: offsets[1]!, at };
}

function areNumbers(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((each) => Number.isSafeInteger(each) && (each as number) >= 0);
}

/** Return the keys of a JSON object in their order, which `JSON.parse` does not keep. Throws for a key that is twice there. */
function listKeys(text: string): string[] {
  const scopes: Set<string>[] = [];
  const keys: string[] = [];
  const token = /"(?:[^"\\]|\\.)*"(\s*:)?|[{}]/gs;
  for (const match of text.matchAll(token)) {
    if (match[0] === "{") scopes.push(new Set());
    else if (match[0] === "}") scopes.pop();
    else if (match[1] !== undefined) {
      const key = JSON.parse(match[0].slice(0, match[0].length - match[1].length)) as string;
      const scope = scopes[scopes.length - 1];
      if (scope === undefined || scope.has(key)) throw new FedplatError("the safetensors header has a key twice");
      scope.add(key);
      if (scopes.length === 1) keys.push(key);
    }
  }
  return keys;
}

function writeHeader(carry: string, places: Place[]): Uint8Array {
  const entries = [`${JSON.stringify(METADATA)}:${JSON.stringify({ [CARRY]: carry })}`];
  let at = 0;
  for (const { name, dtype, shape, start, stop } of places) {
    const entry = { dtype, shape, data_offsets: [at, at + stop - start] };
    entries.push(`${JSON.stringify(name)}:${JSON.stringify(entry)}`);
    at += stop - start;
  }
  const text = new TextEncoder().encode(`{${entries.join(",")}}`);
  const padding = (8 - (text.length % 8)) % 8;
  const header = new Uint8Array(8 + text.length + padding).fill(0x20);
  new DataView(header.buffer).setBigUint64(0, BigInt(text.length + padding), true);
  header.set(text, 8);
  return header;
}
