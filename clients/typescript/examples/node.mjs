// Trains the model of linear.mjs on Node: FEDPLAT_TICKET=... node examples/node.mjs FOLDER NUMBER
import { openClient } from "@fedplat/client";
import { makeRows, makeTrainer } from "./linear.mjs";

const [folder = "fedplat-client", number = "0"] = process.argv.slice(2);
const stop = new AbortController();
process.once("SIGTERM", () => stop.abort());
process.once("SIGINT", () => stop.abort());
try {
  const client = openClient({ ticket: process.env.FEDPLAT_TICKET ?? "", folder, log: console.log });
  client.trainer("linear", makeTrainer(makeRows(Number(number))));
  await client.run({ signal: stop.signal });
  process.exit(0);
} catch (error) {
  console.error(`error: ${error.message}`);
  process.exit(1);
}
