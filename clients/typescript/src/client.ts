import { AssignmentFailedError, CallError, FedplatError, FinalError, StoppedError } from "./errors.js";
import type { RetryWindow } from "./errors.js";
import { makeUpdate, readModel } from "./models.js";
import type { Model, Values } from "./models.js";
import * as fleet from "./messages/fedplat/wire/v1/fleet_pb.js";
import { Reason } from "./messages/fedplat/wire/v1/model_pb.js";
import { PROTOCOL_VERSION, SOFTWARE_VERSION, Session } from "./session.js";
import { sha256, toHex } from "./signing.js";
import type { Bytes } from "./signing.js";
import type { Store, Transport } from "./transport.js";
import type { Ticket } from "./ticket.js";

export type Scalar = boolean | number | string;

/** What a trainer or an evaluator gets. */
export interface Task {
  readonly name: string;
  readonly jobName: string;
  readonly round: number;
  readonly numRounds: number;
  readonly config: Readonly<Record<string, Scalar>>;
  /** The model; a trainer may change the values of its tensors. */
  readonly model: Model;
  /** It is aborted when the task must stop. */
  readonly signal: AbortSignal;
  /**
   * Show the completed part of the work, 0 to 1, and let the client's heartbeats run. Throws `StoppedError` if the task
   * must stop: let it pass.
   */
  progress(fraction: number): Promise<void>;
}

export interface TrainResult {
  /** The weight of the client in the average. */
  numExamples: number;
  metrics?: Record<string, number>;
  /** The trained values by name; by default those of `task.model`. */
  trained?: ReadonlyMap<string, Values>;
}

export interface EvaluateResult {
  numExamples: number;
  metrics: Record<string, number>;
}

export type Trainer = (task: Task) => Promise<TrainResult>;
export type Evaluator = (task: Task) => Promise<EvaluateResult>;

export interface TrainerOptions {
  /** Local algorithms of jobs (`config.algorithm`) that the trainer implements, besides `sgd`. */
  algorithms?: readonly string[];
}

export interface ClientParts {
  ticket: Ticket;
  store: Store;
  transport: Transport;
  labels?: Record<string, string>;
  /** The largest model that is downloaded, in bytes (1 GiB): it is held in memory. */
  maxModelBytes?: number;
  log?: (line: string) => void;
}

const CHECK_IN_S = 25;
const CALL_S = 30;
const SHORTEST_POLL_S = 5;
const INLINE_BYTES = 256 * 2 ** 10;
const TRANSFER_TRIES = 8;
const FAIL_TRIES = 3;
const FIRST_HEARTBEAT_S = 0.25;
const LEAST_HEARTBEAT_S = 0.1;
const LONGEST_RETRY_S = 86_400;
const TEXT_LIMIT = 500;
/** Longer timers than this one run out at once. */
const LONGEST_TIMER_MS = 2 ** 31 - 1;

type Assignment = fleet.Assignment;

interface Registered {
  run: Trainer | Evaluator;
  algorithms: readonly string[];
}

/** A participant of one population on one server. */
export class Client {
  private readonly trainers = new Map<string, Registered>();
  private readonly evaluators = new Map<string, Registered>();
  private readonly log: (line: string) => void;

  constructor(private readonly parts: ClientParts) {
    this.log = parts.log ?? (() => undefined);
  }

  /** Register a trainer. */
  trainer(name: string, run: Trainer, options: TrainerOptions = {}): this {
    return this.register(this.trainers, name, run, options.algorithms ?? []);
  }

  /** Register an evaluator. */
  evaluator(name: string, run: Evaluator): this {
    return this.register(this.evaluators, name, run, []);
  }

  /**
   * Run assignments until the signal is aborted, or `maxTasks` of them have ended. An unreachable server is tried again
   * without a limit. Throws `FinalError` if the server does not accept this client.
   */
  async run(options: { signal?: AbortSignal; maxTasks?: number } = {}): Promise<void> {
    if (this.trainers.size + this.evaluators.size === 0) {
      throw new FedplatError("the client has no trainer and no evaluator; add one with client.trainer(name, run)");
    }
    const { ticket, store, transport } = this.parts;
    const signal = options.signal ?? new AbortController().signal;
    const identity = await store.open(ticket.server, ticket.population);
    const session = new Session(transport, store, identity, ticket);
    await new Loop(session, this, signal, options.maxTasks ?? Infinity).run();
  }

  /** @internal */
  describe(): { labels: Record<string, string>; trainers: string[]; evaluators: string[] } {
    return {
      labels: this.parts.labels ?? {},
      trainers: [...this.trainers.keys()].sort(),
      evaluators: [...this.evaluators.keys()].sort(),
    };
  }

  /** @internal Return what runs an assignment. Throws `AssignmentFailedError` for one that this client must refuse. */
  find(assignment: Assignment): Registered {
    const refuse = (reason: Reason, text: string) => {
      throw new AssignmentFailedError(reason, text);
    };
    const isEvaluation = assignment.task === fleet.Task.EVALUATE;
    if (assignment.secureSetup.length > 0) {
      refuse(Reason.UNSAFE_AGGREGATION, "this client does not implement secure aggregation, and sends no update without it");
    }
    if (assignment.gossipSetup !== undefined) {
      refuse(Reason.UNSAFE_AGGREGATION, "this client does not exchange models with other clients");
    }
    if (!isEvaluation && assignment.task !== fleet.Task.TRAIN) {
      refuse(Reason.UNKNOWN_TRAINER, `this client does not know the task ${assignment.task}; it trains and evaluates`);
    }
    const kind = isEvaluation ? this.evaluators : this.trainers;
    const found = kind.get(assignment.trainer);
    if (found === undefined) {
      const available = [...kind.keys()].join(", ") || "none";
      const what = isEvaluation ? "evaluator" : "trainer";
      throw new AssignmentFailedError(
        Reason.UNKNOWN_TRAINER,
        `the client has no ${what} '${assignment.trainer}'; available: ${available}`,
      );
    }
    if (isEvaluation) return found;
    if (assignment.uplink !== "") {
      refuse(Reason.UNKNOWN_CODEC, `this client has no codecs; the job needs ${assignment.uplink.slice(0, 200)}`);
    }
    const { algorithm = "sgd", dp = "none" } = readConfig(assignment);
    if (algorithm !== "sgd" && !found.algorithms.includes(String(algorithm))) {
      refuse(Reason.TRAINER_ERROR, `the trainer '${assignment.trainer}' does not implement the algorithm ${algorithm}`);
    }
    if (dp !== "none") {
      refuse(Reason.TRAINER_ERROR, "this client does not implement example-level privacy (config.dp)");
    }
    return found;
  }

  /** @internal */
  get maxModelBytes(): number {
    return this.parts.maxModelBytes ?? 2 ** 30;
  }

  /** @internal */
  note(line: string): void {
    this.log(line);
  }

  private register(
    table: Map<string, Registered>,
    name: string,
    run: Trainer | Evaluator,
    algorithms: readonly string[],
  ): this {
    if (!/^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$/.test(name)) {
      throw new FedplatError(`the name ${JSON.stringify(name)} has other characters than letters, digits or _.-`);
    }
    if (table.has(name)) throw new FedplatError(`there is a trainer or evaluator '${name}' already`);
    table.set(name, { run, algorithms });
    return this;
  }
}

class Backoff {
  private failures = 0;

  /** Return the seconds to wait after one more failure, not before the server's retry window. */
  next(retry?: RetryWindow): number {
    const bound = Math.min(30, 0.5 * 2 ** Math.min(this.failures++, 64));
    const delay = Math.random() * bound;
    return retry === undefined ? delay : Math.max(delay, draw(retry));
  }

  reset(): void {
    this.failures = 0;
  }
}

function draw({ minS, maxS }: RetryWindow): number {
  const earliest = Math.min(Math.max(0, minS || 0), LONGEST_RETRY_S);
  const latest = Math.min(Math.max(earliest, maxS || 0), LONGEST_RETRY_S);
  return earliest + Math.random() * (latest - earliest);
}

/** Wait until the time is over, or the signal is aborted. */
async function sleep(seconds: number, signal: AbortSignal): Promise<void> {
  if (signal.aborted) return;
  await new Promise<void>((resolve) => {
    const timer = setTimeout(end, Math.min(seconds * 1000 + 1, LONGEST_TIMER_MS));
    function end(): void {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    }
    signal.addEventListener("abort", end);
  });
}

function readConfig(assignment: Assignment): Record<string, Scalar> {
  const config: Record<string, Scalar> = {};
  for (const [name, { kind }] of Object.entries(assignment.config)) {
    config[name] = kind.case === undefined ? "" : typeof kind.value === "bigint" ? Number(kind.value) : kind.value;
  }
  return config;
}

function isRetryable(error: unknown): error is CallError {
  return error instanceof CallError && (error.remedy === "retry" || error.remedy === "reopen");
}

const nowS = (): number => performance.now() / 1000;

/** Checks in and works until it is stopped. */
class Loop {
  private readonly backoff = new Backoff();
  private pollS = CHECK_IN_S;
  private hasEnrolledAgain = false;

  constructor(
    private readonly session: Session,
    private readonly client: Client,
    private readonly signal: AbortSignal,
    private readonly maxTasks: number,
  ) {}

  async run(): Promise<void> {
    let numTasks = 0;
    while (!this.signal.aborted && numTasks < this.maxTasks) {
      let delayS: number;
      const began = nowS();
      try {
        const response = await this.checkIn();
        this.backoff.reset();
        this.hasEnrolledAgain = false;
        if (response.outcome.case === "assignment") {
          numTasks++;
          delayS = await new Work(this.session, this.client, response.outcome.value, this.signal).run();
        } else {
          const retry = response.outcome.value?.retry;
          delayS = retry === undefined ? this.backoff.next() : draw(retry);
        }
      } catch (error) {
        if (this.signal.aborted) return;
        delayS = await this.recover(error, nowS() - began);
      }
      await sleep(delayS, this.signal);
    }
  }

  private async checkIn(): Promise<fleet.CheckInResponse> {
    const { labels, trainers, evaluators } = this.client.describe();
    await this.session.enroll(labels, this.signal);
    const waitS = this.pollS;
    const init = {
      protocolVersion: PROTOCOL_VERSION,
      softwareVersion: SOFTWARE_VERSION,
      labels,
      trainers,
      evaluators,
      waitS,
    };
    const [input, output] = [fleet.CheckInRequestSchema, fleet.CheckInResponseSchema];
    const response = await this.session.call("CheckIn", input, init, output, this.signal, waitS + CALL_S);
    this.pollS = Math.min(CHECK_IN_S, 1.05 * this.pollS);
    return response;
  }

  /** Return after how many seconds to go on after a failure. */
  private async recover(error: unknown, lastedS: number): Promise<number> {
    if (!(error instanceof CallError)) throw error;
    const isEnrolling = this.session.clientId === "";
    if (error.remedy === "enroll" && !this.hasEnrolledAgain) {
      this.hasEnrolledAgain = true;
      await this.session.forgetEnrollment();
      return 0;
    }
    if (error.remedy === "end" || error.remedy === "enroll" || (isEnrolling && error.remedy === "refused")) {
      throw new FinalError(`the server does not accept this client: ${error.message} (${error.code || error.status})`);
    }
    if (error.httpStatus === 0 && error.code === "" && lastedS >= SHORTEST_POLL_S) {
      this.pollS = Math.min(CHECK_IN_S, Math.max(SHORTEST_POLL_S, 0.8 * lastedS));
      this.backoff.reset();
    }
    this.client.note(`the server cannot be used: ${error.message}`);
    return this.backoff.next(error.retry);
  }
}

/** One assignment. */
class Work {
  private readonly stopped = new AbortController();
  private readonly over = new AbortController();
  private readonly signal: AbortSignal;
  private progress = 0;
  private hasTrained = false;
  private trainingEndsAt: number;
  private uploadS: number;
  private timer: ReturnType<typeof setTimeout> | undefined;
  /** Whether the server has ended the assignment, and needs no word of it. */
  private isEnded = false;
  private retry: RetryWindow | undefined;

  constructor(
    private readonly session: Session,
    private readonly client: Client,
    private readonly assignment: Assignment,
    private readonly owner: AbortSignal,
  ) {
    this.signal = AbortSignal.any([owner, this.stopped.signal]);
    this.trainingEndsAt = nowS() + assignment.trainingTimeoutS;
    this.uploadS = assignment.uploadTimeoutS;
  }

  /** Do the work; return after how many seconds the client checks in again. */
  async run(): Promise<number> {
    const { jobName, round } = this.assignment;
    this.client.note(`the task started: round ${round} of the job ${jobName}`);
    this.setTimer();
    const heartbeats = this.beat();
    try {
      const found = this.client.find(this.assignment);
      const update = await this.compute(found);
      this.hasTrained = true;
      this.setTimer();
      if (update.file !== undefined && update.file.length > INLINE_BYTES) await this.upload(update);
      this.over.abort();
      await heartbeats;
      if (this.signal.aborted) throw new StoppedError("the task was stopped");
      return await this.report(update);
    } catch (error) {
      return await this.end(error);
    } finally {
      clearTimeout(this.timer);
      this.over.abort();
      await heartbeats;
    }
  }

  private async end(error: unknown): Promise<number> {
    this.over.abort();
    if (this.isEnded) return this.retry === undefined ? 0 : draw(this.retry);
    if (this.owner.aborted) {
      await this.fail(Reason.CLIENT_STOPPED, "the client was stopped");
      return 0;
    }
    if (error instanceof CallError && error.remedy === "drop") return 0;
    if (error instanceof CallError && (error.remedy === "end" || error.remedy === "enroll")) throw error;
    const text = error instanceof Error ? error.message : String(error);
    const reason =
      error instanceof AssignmentFailedError
        ? error.reason
        : error instanceof CallError
          ? Reason.TRANSFER_FAILED
          : Reason.TRAINER_ERROR;
    this.client.note(`the task failed: ${text}`);
    await this.fail(reason, text.slice(0, TEXT_LIMIT) || "the trainer raised an error without a text");
    return new Backoff().next();
  }

  private async fail(reason: Reason, text: string): Promise<void> {
    const backoff = new Backoff();
    const never = new AbortController().signal;
    const init = { token: this.assignment.token, reason, text };
    for (let number = 1; number <= FAIL_TRIES; number++) {
      try {
        await this.session.call("Fail", fleet.FailRequestSchema, init, fleet.FailResponseSchema, never, 5);
        return;
      } catch (error) {
        if (!isRetryable(error)) return;
        await sleep(backoff.next(error.retry), this.owner);
      }
    }
  }

  private async compute(found: Registered): Promise<Update> {
    const { assignment } = this;
    const base = await this.load();
    let model: Model;
    try {
      model = readModel(base);
    } catch (error) {
      throw new AssignmentFailedError(Reason.TRANSFER_FAILED, `the model cannot be read: ${(error as Error).message}`);
    }
    const result = await found.run({
      name: assignment.trainer,
      jobName: assignment.jobName,
      round: assignment.round,
      numRounds: assignment.numRounds,
      config: readConfig(assignment),
      model,
      signal: this.signal,
      progress: (fraction) => this.show(fraction),
    });
    if (this.signal.aborted) throw new StoppedError("the task was stopped");
    checkNumbers(result.numExamples, result.metrics ?? {});
    const { numExamples, metrics = {} } = result;
    if (assignment.task === fleet.Task.EVALUATE) return { numExamples, metrics, digest: "", file: undefined };
    const trained =
      (result as TrainResult).trained ?? new Map([...model].map(([name, tensor]) => [name, tensor.values]));
    const file = makeUpdate(base, trained);
    return { numExamples, metrics, digest: toHex(await sha256(file)), file };
  }

  private async show(fraction: number): Promise<void> {
    if (!(fraction >= 0 && fraction <= 1)) {
      throw new FedplatError(`the progress is ${fraction}; expected a number from 0 to 1`);
    }
    this.progress = fraction;
    await new Promise((resolve) => setTimeout(resolve, 0));
    if (this.signal.aborted) throw new StoppedError("the task was stopped");
  }

  /** Return the model's file, with the digest that the assignment names. */
  private async load(): Promise<Bytes> {
    const { modelBytes, model } = this.assignment;
    if (model === undefined) throw new AssignmentFailedError(Reason.TRANSFER_FAILED, "the assignment has no model");
    const size = Number(model.sizeBytes);
    if (size > this.client.maxModelBytes) {
      throw new AssignmentFailedError(
        Reason.TRANSFER_FAILED,
        `the model has ${size} bytes; this client accepts at most ${this.client.maxModelBytes}`,
      );
    }
    const file = modelBytes.length > 0 ? (modelBytes as Bytes) : await this.download(model.digest, size);
    const digest = toHex(await sha256(file));
    if (digest !== model.digest) {
      throw new AssignmentFailedError(
        Reason.TRANSFER_FAILED,
        `the model has the digest ${digest}; expected ${model.digest}`,
      );
    }
    return file;
  }

  private async download(digest: string, size: number): Promise<Bytes> {
    const file = new Uint8Array(size);
    const patience = new Patience(this.signal, "the download of the model");
    let at = 0;
    while (at < size) {
      const before = at;
      let failure: unknown = new CallError("unavailable", "the response ended early");
      try {
        for await (const part of this.session.download(digest, at, this.signal, this.leftS)) {
          if (at + part.length > size) {
            throw new AssignmentFailedError(Reason.TRANSFER_FAILED, `the server sends more than the ${size} bytes`);
          }
          file.set(part, at);
          at += part.length;
        }
      } catch (error) {
        if (!isRetryable(error)) throw error;
        failure = error;
      }
      if (at < size) await patience.wait(failure as CallError, at > before);
    }
    return file;
  }

  private async upload({ digest, file }: Update): Promise<void> {
    if (file === undefined) return;
    const { token } = this.assignment;
    const patience = new Patience(this.signal, "the upload of the update");
    let at = 0;
    while (at < file.length) {
      const before = at;
      let failure: CallError | undefined;
      try {
        at = await this.session.upload(token, digest, file, at, this.signal, this.leftS);
      } catch (error) {
        if (!isRetryable(error) && !(error instanceof CallError && error.remedy === "query")) throw error;
        failure = error;
      }
      if (failure !== undefined) {
        if (failure.code === "TOO_MANY_UPLOADS") {
          await sleep(draw(failure.retry ?? { minS: 1, maxS: 10 }), this.signal);
        } else {
          await patience.wait(failure, false);
        }
        at = await this.query(token, digest, patience);
      }
      if (at > file.length) {
        throw new AssignmentFailedError(Reason.TRANSFER_FAILED, `the server has ${at} bytes of ${file.length}`);
      }
      if (at > before) patience.reset();
      else if (failure === undefined) {
        await patience.wait(new CallError("unavailable", "the server stored only a part"), false);
      }
    }
  }

  private async query(token: string, digest: string, patience: Patience): Promise<number> {
    const [input, output] = [fleet.QueryUploadRequestSchema, fleet.QueryUploadResponseSchema];
    for (;;) {
      try {
        const found = await this.session.call("QueryUpload", input, { token, digest }, output, this.signal);
        return Number(found.receivedBytes);
      } catch (error) {
        if (!isRetryable(error)) throw error;
        await patience.wait(error, false);
      }
    }
  }

  /** Report until the server answers; return after how many seconds the client checks in again. */
  private async report(update: Update): Promise<number> {
    const { file, digest, numExamples, metrics } = update;
    const small = file !== undefined && file.length <= INLINE_BYTES ? file : new Uint8Array();
    const init = { token: this.assignment.token, digest, numExamples, metrics, update: small };
    const [input, output] = [fleet.ReportRequestSchema, fleet.ReportResponseSchema];
    const never = new AbortController().signal; // the answer is worth waiting for
    const backoff = new Backoff();
    for (;;) {
      try {
        const { outcome } = await this.session.call("Report", input, init, output, never);
        if (outcome.case !== "refusal") {
          this.client.note("the task is done and reported");
          return 0;
        }
        this.client.note(`the server rejected the report: ${outcome.value.text}`);
        return outcome.value.retry === undefined ? backoff.next() : draw(outcome.value.retry);
      } catch (error) {
        if (!isRetryable(error) || this.leftS <= 0 || this.owner.aborted) {
          if (error instanceof CallError && (error.remedy === "end" || error.remedy === "enroll")) throw error;
          this.isEnded = true;
          throw error;
        }
        await sleep(backoff.next(error.retry), this.owner);
        if (error.code === "UPLOAD_INCOMPLETE" && file !== undefined && file.length > INLINE_BYTES) {
          await this.upload(update);
        }
      }
    }
  }

  private get leftS(): number {
    return Math.max(0, this.trainingEndsAt + this.uploadS - nowS());
  }

  private setTimer(): void {
    clearTimeout(this.timer);
    const seconds = this.trainingEndsAt - nowS() + (this.hasTrained ? this.uploadS : 0);
    this.timer = setTimeout(
      () => {
        this.isEnded = true;
        this.stopped.abort();
      },
      Math.min(Math.max(0, seconds) * 1000, LONGEST_TIMER_MS),
    );
  }

  /** Send heartbeats until the work is over. */
  private async beat(): Promise<void> {
    const over = AbortSignal.any([this.signal, this.over.signal]);
    const heartbeatS = Math.max(LEAST_HEARTBEAT_S, this.assignment.heartbeatS);
    const [input, output] = [fleet.HeartbeatRequestSchema, fleet.HeartbeatResponseSchema];
    const backoff = new Backoff();
    let waitS = heartbeatS;
    await sleep(FIRST_HEARTBEAT_S, over);
    while (!over.aborted) {
      try {
        const init = { token: this.assignment.token, progress: this.progress, waitS };
        const { verdict } = await this.session.call("Heartbeat", input, init, output, over, waitS + CALL_S);
        backoff.reset();
        waitS = heartbeatS;
        if (verdict.case === "stop") {
          this.isEnded = true;
          this.retry = verdict.value.retry;
          this.stopped.abort();
        } else if (verdict.case === "proceed") {
          this.adjust(verdict.value);
        }
      } catch (error) {
        if (over.aborted) return;
        if (error instanceof CallError && error.remedy === "end") {
          this.isEnded = true; // the next check-in gets the same refusal, which ends the client
          this.stopped.abort();
          return;
        }
        waitS = 0;
        await sleep(backoff.next(error instanceof CallError ? error.retry : undefined), over);
      }
    }
  }

  private adjust({ remainingS, uploading }: fleet.Continue): void {
    this.trainingEndsAt = nowS() + remainingS;
    if (uploading) this.uploadS = 0;
    this.setTimer();
  }
}

interface Update {
  numExamples: number;
  metrics: Record<string, number>;
  digest: string;
  /** Undefined for an evaluation. */
  file: Bytes | undefined;
}

/** Waits after each break of a transfer; throws after too many in a row without a new byte. */
class Patience {
  private readonly backoff = new Backoff();
  private idle = 0;

  constructor(
    private readonly signal: AbortSignal,
    private readonly name: string,
  ) {}

  async wait(failure: CallError, hasProgress: boolean): Promise<void> {
    if (hasProgress) this.reset();
    else this.idle++;
    if (this.idle >= TRANSFER_TRIES) {
      const text = `${this.name} broke ${this.idle} times in a row without progress; last: ${failure.message}`;
      throw new AssignmentFailedError(Reason.TRANSFER_FAILED, text);
    }
    await sleep(this.backoff.next(failure.retry), this.signal);
    this.signal.throwIfAborted();
  }

  reset(): void {
    this.idle = 0;
    this.backoff.reset();
  }
}

function checkNumbers(numExamples: number, metrics: Record<string, number>): void {
  if (!(numExamples >= 1e-6 && numExamples <= 1e15)) {
    throw new FedplatError(`numExamples is ${numExamples}; expected a number from 1e-6 to 1e15`);
  }
  for (const [name, value] of Object.entries(metrics)) {
    if (!Number.isFinite(value)) throw new FedplatError(`the metric '${name}' is ${value}; expected a finite number`);
  }
}
