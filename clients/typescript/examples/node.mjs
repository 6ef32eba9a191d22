// Trains the model of linear.mjs on Node: FEDPLAT_TICKET=... node examples/node.mjs FOLDER NUMBER
import { openClient } from "@fedplat/client";
import { makeRows, makeTrainer } from "./linear.mjs";

const [folder = "fedplat-client", number = "0"] = process.argv.slice(2);
const stop = new AbortController();
process.once("SIGTERM", () => stop.abort());
process.once("SIGINT", () => stop.abort());
try {
  const { FEDPLAT_TICKET: ticket = "", FEDPLAT_TRANSPORT: transport } = process.env;
  const client = openClient({ ticket, folder, transport, log: console.log });
  client.trainer("linear", makeTrainer(makeRows(Number(number))));
  await client.run({ signal: stop.signal });
  process.exit(0);
} catch (error) {
  console.error(`error: ${error.message}`);
  process.exit(1);
}
