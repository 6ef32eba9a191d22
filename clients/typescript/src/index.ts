export { Client } from "./client.js";
export type {
  ClientParts,
  EvaluateResult,
  Evaluator,
  Scalar,
  Task,
  TrainResult,
  Trainer,
  TrainerOptions,
} from "./client.js";
export { CallError, FedplatError, FinalError, StoppedError } from "./errors.js";
export { makeUpdate, readModel } from "./models.js";
export type { Model, Tensor, Values } from "./models.js";
export { callPayload, proofPayload } from "./signing.js";
export { parseTicket } from "./ticket.js";
export type { Ticket } from "./ticket.js";
export type { HttpRequest, HttpResponse, Identity, Store, Transport } from "./transport.js";
