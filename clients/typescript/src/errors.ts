/** An error of this package; its message says what was wrong, what was expected, and what to do. */
export class FedplatError extends Error {
  override readonly name: string = "FedplatError";
}

/** The client must end: the server does not accept it, and a repetition does not help. */
export class FinalError extends FedplatError {
  override readonly name = "FinalError";
}

/** The task must stop: a trainer lets this error pass. */
export class StoppedError extends FedplatError {
  override readonly name = "StoppedError";
}

/** The time in seconds within which a call may be made again. */
export interface RetryWindow {
  minS: number;
  maxS: number;
}

/** What a client does after a call that failed (docs/protocol.md, "Errors"). */
export type Remedy = "reopen" | "end" | "enroll" | "drop" | "query" | "retry" | "refused";

const REMEDIES: Record<string, Remedy> = {
  SESSION_UNKNOWN: "reopen",
  REPLAYED: "reopen",
  CHALLENGE_EXPIRED: "retry",
  FENCED: "end",
  REVOKED: "end",
  TOKEN_UNKNOWN: "end",
  TOKEN_REFUSED: "end",
  UNSUPPORTED_VERSION: "end",
  CLIENT_UNKNOWN: "enroll",
  STALE_ASSIGNMENT: "drop",
  WRONG_OFFSET: "query",
};
const TRY_LATER = new Set([
  "unavailable",
  "deadline_exceeded",
  "resource_exhausted",
  "aborted",
  "internal",
  "unknown",
  "canceled",
]);

/** A call that failed: `status` is that of the Connect protocol, `code` the server's error code, if it has one. */
export class CallError extends FedplatError {
  override readonly name = "CallError";
  readonly remedy: Remedy;

  constructor(
    readonly status: string,
    text: string,
    readonly code = "",
    readonly retry?: RetryWindow,
    readonly httpStatus = 0,
  ) {
    super(text);
    const known = REMEDIES[code];
    this.remedy = known ?? (TRY_LATER.has(status) ? "retry" : status === "unauthenticated" ? "end" : "refused");
  }
}

/** The client gives up an assignment; `reason` is one of `model.proto`, for the server. */
export class AssignmentFailedError extends FedplatError {
  override readonly name = "AssignmentFailedError";

  constructor(
    readonly reason: number,
    text: string,
  ) {
    super(text);
  }
}
