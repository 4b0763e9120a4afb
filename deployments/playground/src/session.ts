/** The conversation: turns, each with one answer or two, and what runs. Knows the API; knows no page. */

import { useCallback, useReducer, useRef } from "react";

import { chat, type Chunk, type Message, ServerError } from "./api";
import { fresh, type Kind, type Run, taken, text } from "./run";

export type Mode = Kind | "both";

export interface Settings {
  temperature: string;
  top_p: string;
  seed: string;
  max_tokens: string;
  budget: string; // a number, or "auto"
  key: string;
}

export interface Turn {
  id: number;
  question: string;
  mode: Mode;
  runs: Run[];
}

type Action =
  | { type: "ask"; turn: Turn }
  | { type: "change"; turn: number; run: number; to: (run: Run) => Run }
  | { type: "clear" };

function reduce(turns: Turn[], action: Action): Turn[] {
  switch (action.type) {
    case "ask":
      return [...turns, action.turn];
    case "change":
      return turns.map((turn) =>
        turn.id === action.turn
          ? { ...turn, runs: turn.runs.map((run, i) => (i === action.run ? action.to(run) : run)) }
          : turn,
      );
    case "clear":
      return [];
  }
}

/** What was said, for the next question. An answer that failed is left out together with its question. */
function history(turns: Turn[]): Message[] {
  return turns.flatMap(({ question, runs }) => {
    const answer = runs[0] ? text(runs[0]) : "";
    return answer
      ? [{ role: "user" as const, content: question }, { role: "assistant" as const, content: answer }]
      : [];
  });
}

/** The fields of a request. What is left empty is the server's to say, but for the seed of two answers that are compared. */
function fields(settings: Settings, kind: Kind, seed: number) {
  const numbers = Object.entries({
    temperature: settings.temperature,
    top_p: settings.top_p,
    seed: settings.seed || String(seed),
    max_tokens: settings.max_tokens,
  }).filter(([, value]) => value.trim() !== "");
  const budget = kind === "plain" ? 0 : settings.budget === "auto" ? "auto" : Number(settings.budget);
  return {
    ...Object.fromEntries(numbers.map(([name, value]) => [name, Number(value)])),
    ddtree: { budget, return_rounds: true },
  };
}

export function useSession() {
  const [turns, dispatch] = useReducer(reduce, []);
  const running = useRef<AbortController | null>(null);
  const count = useRef(0);

  const ask = useCallback(
    async (question: string, mode: Mode, settings: Settings, before: Turn[]) => {
      running.current?.abort();
      const control = new AbortController();
      running.current = control;
      const id = ++count.current;
      const kinds: Kind[] = mode === "both" ? ["speculative", "plain"] : [mode];
      dispatch({ type: "ask", turn: { id, question, mode, runs: kinds.map(fresh) } });
      const messages = [...history(before), { role: "user" as const, content: question }];
      const seed = Math.floor(Math.random() * 2 ** 31);
      // One after the other, each alone: side by side in one batch each would have the other's rounds in its own.
      for (const [run, kind] of kinds.entries()) {
        const change = (to: (run: Run) => Run) => dispatch({ type: "change", turn: id, run, to });
        await answer({ messages, ...fields(settings, kind, seed) }, settings.key, control.signal, change);
      }
      if (running.current === control) running.current = null;
    },
    [],
  );

  const stop = useCallback(() => running.current?.abort(), []);
  const clear = useCallback(() => {
    running.current?.abort();
    dispatch({ type: "clear" });
  }, []);
  const busy = turns.some(({ runs }) => runs.some(({ state }) => state === "running" || state === "waiting"));
  return { turns, busy, ask, stop, clear };
}

/** Run a request. What comes within one frame of the screen is shown at once. */
async function answer(
  body: object,
  key: string,
  signal: AbortSignal,
  change: (to: (run: Run) => Run) => void,
): Promise<void> {
  let waiting: [Chunk, number][] = [];
  let frame = 0;
  const show = () => {
    const chunks = waiting;
    waiting = [];
    frame = 0;
    change((run) => taken(run, chunks));
  };
  try {
    signal.throwIfAborted();
    change((run) => ({ ...run, state: "running", begun: performance.now() }));
    for await (const chunk of chat(body, key, signal)) {
      waiting.push([chunk, performance.now()]);
      frame ||= requestAnimationFrame(show);
    }
    show();
    change((run) => ({ ...run, state: "done" }));
  } catch (error) {
    show();
    if (signal.aborted) {
      change((run) => ({ ...run, state: "stopped" }));
    } else {
      if (!(error instanceof ServerError)) console.error(error);
      const message = error instanceof Error ? error.message : String(error);
      change((run) => ({ ...run, state: "failed", error: message }));
    }
  } finally {
    cancelAnimationFrame(frame);
  }
}
