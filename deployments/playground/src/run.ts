/** One answer as it comes, and its figures. Knows rounds; knows no page and no server. */

import type { Chunk, Round } from "./api";

export type Kind = "speculative" | "plain";

/** What one round brought. */
export interface Piece {
  round: Round;
  text: string; // may be empty: the bytes of a character come in several tokens
  at: number; // ms, when it came
}

export interface Run {
  kind: Kind;
  state: "waiting" | "running" | "done" | "stopped" | "failed";
  pieces: Piece[];
  tokens: number;
  begun: number | null; // ms
  finish: string | null;
  error: string | null;
}

export const fresh = (kind: Kind): Run => ({
  kind,
  state: "waiting",
  pieces: [],
  tokens: 0,
  begun: null,
  finish: null,
  error: null,
});

export const gained = (round: Round): number => round.accepted.length + (round.bonus ? 1 : 0);

/** With chunks, and when each came. */
export function taken(run: Run, chunks: [Chunk, number][]): Run {
  const pieces = run.pieces.slice();
  let { tokens, finish } = run;
  for (const [chunk, at] of chunks) {
    finish = chunk.finish ?? finish;
    if (!chunk.round) continue;
    pieces.push({ round: chunk.round, text: chunk.text, at });
    tokens += gained(chunk.round);
  }
  return { ...run, pieces, tokens, finish };
}

export const text = (run: Run): string => run.pieces.map((piece) => piece.text).join("");

export const tokenIds = (run: Run): number[] =>
  run.pieces.flatMap(({ round }) => [
    ...round.accepted.map((node) => round.nodes[node]!.id),
    ...(round.bonus ? [round.bonus.id] : []),
  ]);

/** Tokens per second after the first round, whose time is the prompt's. */
export function speed(run: Run): number | null {
  const first = run.pieces[0];
  const last = run.pieces.at(-1);
  if (!first || !last || last.at <= first.at) return null;
  return ((run.tokens - gained(first.round)) * 1000) / (last.at - first.at);
}

/** Tokens that a round of decoding brought, on average. */
export function acceptanceLength(run: Run): number | null {
  const decoded = run.pieces.filter(({ round }) => round.nodes.length);
  if (!decoded.length) return null;
  return decoded.reduce((sum, { round }) => sum + gained(round), 0) / decoded.length;
}

/** How many leading tokens two answers share. */
export function shared(a: Run, b: Run): number {
  const [left, right] = [tokenIds(a), tokenIds(b)];
  const at = left.findIndex((token, i) => token !== right[i]);
  return at < 0 ? left.length : at;
}
