/** What serves: drafters, verifier, queue, KV memory, times. Asks while it is there and the page is seen, and never else. */

import { useEffect, useState } from "react";

import { type Health, health, metrics } from "./api";
import { Stages } from "./Inspector";
import { byLabel, total } from "./metrics";
import { decimal } from "./words";

const EVERY = 2000; // ms

interface Counts {
  at: number; // ms
  rounds: number;
  tokens: number;
  stages: Record<string, number>; // seconds
}

interface State {
  health: Health;
  now: Counts;
  before: Counts | null;
}

const counts = (text: string): Counts => ({
  at: performance.now(),
  rounds: total(text, "ddtree:rounds_total"),
  tokens: total(text, "vllm:generation_tokens_total"),
  stages: byLabel(text, "ddtree:stage_seconds_total", "stage"),
});

function usePolled(): [State | null, string | null] {
  const [state, setState] = useState<State | null>(null);
  const [error, setError] = useState<string | null>(null);
  useEffect(() => {
    const control = new AbortController();
    let timer = 0;
    async function poll() {
      clearTimeout(timer);
      if (document.hidden || control.signal.aborted) return;
      try {
        const [found, text] = await Promise.all([health(control.signal), metrics(control.signal)]);
        setState((last) => ({ health: found, now: counts(text), before: last?.now ?? null }));
        setError(null);
      } catch (reason) {
        if (!control.signal.aborted) setError((reason as Error).message);
      }
      clearTimeout(timer);
      if (!control.signal.aborted) timer = window.setTimeout(poll, EVERY);
    }
    document.addEventListener("visibilitychange", poll, { signal: control.signal });
    void poll();
    return () => {
      control.abort();
      clearTimeout(timer);
    };
  }, []);
  return [state, error];
}

export function Engine() {
  const [state, error] = usePolled();
  return (
    <section className="engine" id="engine" aria-label="Engine">
      {error && (
        <p className="error" role="alert">
          {error}
        </p>
      )}
      {!state && !error && <p className="note">Asking the server…</p>}
      {state && <Cards {...state} />}
    </section>
  );
}

function Cards({ health: { kv_pages: pages, ...found }, now, before }: State) {
  const used = pages.total - pages.free;
  const rounds = before ? now.rounds - before.rounds : 0;
  const rate = before ? ((now.tokens - before.tokens) * 1000) / (now.at - before.at) : null;
  // Of the rounds since the last look; where there were none, of all.
  const [over, since] = rounds && before ? [rounds, before.stages] : [now.rounds, {} as Record<string, number>];
  const stages = Object.entries(now.stages).map(([stage, value]) => [stage, (value - (since[stage] ?? 0)) / (over || 1)]);
  return (
    <>
      <div className="card">
        <h2>Verifier</h2>
        <p className={found.verifier_connected ? "up" : "down"}>{found.verifier_connected ? "connected" : "away"}</p>
        <small>messages by {found.transport}</small>
      </div>
      <div className="card">
        <h2>Drafters</h2>
        <p>{found.drafters.length}</p>
        <small>{found.drafters.join(", ") || "none: every tree is its root"}</small>
      </div>
      <div className="card">
        <h2>Queue</h2>
        <p>
          {found.running} running, {found.waiting} waiting
        </p>
        <small>{decimal(rate)} tokens/s</small>
      </div>
      <div className="card">
        <h2 id="kv">KV pages</h2>
        <p>
          {used.toLocaleString("en")} <small>of {pages.total.toLocaleString("en")} in use</small>
        </p>
        <meter aria-labelledby="kv" min={0} max={pages.total} value={used} />
        <small>
          {pages.kept.toLocaleString("en")} kept for prompts, {pages.page_size} tokens each
        </small>
      </div>
      <div className="card wide">
        <h2>Stages</h2>
        <Stages seconds={Object.fromEntries(stages)} label="Mean of a round" />
      </div>
    </>
  );
}
