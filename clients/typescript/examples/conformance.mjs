// The client that passes `fedplat conformance --client "node examples/conformance.mjs"` (docs/protocol.md).
import { FinalError, openClient } from "@fedplat/client";

const { FEDPLAT_TICKET: ticket, FEDPLAT_CLIENT_DATA_DIR: folder, FEDPLAT_TRANSPORT: transport } = process.env;
const stop = new AbortController();
process.once("SIGTERM", () => stop.abort());
process.once("SIGINT", () => stop.abort());

async function train(task) {
  if (task.config.fail) throw new Error("the job asks the trainer to fail");
  const seconds = task.config.seconds ?? 0;
  const began = performance.now();
  for (let done = 0; done < seconds; done = (performance.now() - began) / 1000) {
    await task.progress(done / seconds);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  for (const { dtype, values } of task.model.values()) {
    if (["F64", "F32", "BF16", "F16"].includes(dtype)) {
      for (let index = 0; index < values.length; index++) values[index] += 1;
    }
  }
  return { numExamples: 7 };
}

const client = openClient({ ticket, folder, transport, log: console.error })
  .trainer("conformance", train)
  .evaluator("conformance", async (task) => ({ numExamples: 7, metrics: { tensors: task.model.size } }));
try {
  await client.run({ signal: stop.signal });
  process.exit(0);
} catch (error) {
  console.error(error instanceof FinalError ? error.message : error);
  process.exit(1);
}
