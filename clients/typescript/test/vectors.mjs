// The golden vectors of docs/protocol.md: node test/vectors.mjs FOLDER
import assert from "node:assert/strict";
import { createPrivateKey, sign } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { callPayload, makeUpdate, parseTicket, proofPayload, readModel } from "@fedplat/client";

const load = (name) => JSON.parse(readFileSync(join(process.argv[2], name), "utf8"));
const fromHex = (text) => new Uint8Array(Buffer.from(text, "hex"));
const toHex = (bytes) => Buffer.from(bytes).toString("hex");

const tickets = load("tickets.json");
for (const { text, ...expected } of tickets.read) assert.deepEqual(parseTicket(text), expected);
for (const { text, why } of tickets.refused) assert.throws(() => parseTicket(text), { name: "FedplatError" }, why);

const { seed, calls } = load("calls.json");
const prefix = Buffer.from("302e020100300506032b657004220420", "hex");
const key = createPrivateKey({ key: Buffer.concat([prefix, fromHex(seed)]), format: "der", type: "pkcs8" });
for (const { method, request, nonce, session, counter, payload, signature } of calls) {
  const made =
    nonce === undefined
      ? await callPayload(method, session, BigInt(counter), fromHex(request))
      : await proofPayload(method, fromHex(nonce), fromHex(request));
  assert.equal(toHex(made), payload, method);
  assert.equal(toHex(sign(null, made, key)), signature, method);
}

const models = load("models.json");
for (const { name, base, update } of models.trained) {
  const model = readModel(fromHex(base));
  for (const { dtype, values } of model.values()) {
    if (["F64", "F32", "BF16", "F16"].includes(dtype)) values.forEach((value, at) => (values[at] = value + 1));
  }
  const trained = new Map([...model].map(([tensor, { values }]) => [tensor, values]));
  assert.equal(toHex(makeUpdate(fromHex(base), trained)), update, name);
}
for (const { file, why } of models.refused) assert.throws(() => readModel(fromHex(file)), { name: "FedplatError" }, why);
console.log("all vectors agree");
