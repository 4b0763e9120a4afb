/** One round of an answer: its tree, what it gave and where its time went. */

import type { Round } from "./api";
import { gained, type Run } from "./run";
import { Tree } from "./Tree";
import { milliseconds, visible } from "./words";

const STAGES = ["draft", "build", "verify", "accept", "commit"];

interface Props {
  run: Run | null;
  at: number | null; // which round; null: the latest
  onSelect: (at: number | null) => void;
}

export function Inspector({ run, at, onSelect }: Props) {
  const count = run?.pieces.length ?? 0;
  const index = Math.min(at ?? count - 1, count - 1);
  const round = run?.pieces[index]?.round;
  if (!round) {
    return (
      <section className="inspector empty" aria-label="Draft tree">
        <Legend />
        <p>The draft tree of each round appears here while the answer is written.</p>
      </section>
    );
  }
  return (
    <section className="inspector" aria-label="Draft tree">
      <header className="steps">
        <h2>
          Round {round.number} <small>of {count - 1}</small>
        </h2>
        <button type="button" aria-label="Previous round" disabled={index === 0} onClick={() => onSelect(index - 1)}>
          ‹
        </button>
        <input
          type="range"
          aria-label="Round"
          min={0}
          max={count - 1}
          value={index}
          onChange={(event) => onSelect(Number(event.target.value))}
        />
        <button
          type="button"
          aria-label="Next round"
          disabled={index === count - 1}
          onClick={() => onSelect(index + 1)}
        >
          ›
        </button>
        <button type="button" className="chip" aria-pressed={at === null} onClick={() => onSelect(at === null ? index : null)}>
          Latest
        </button>
      </header>
      <Facts round={round} />
      <Tree key={round.number} round={round} />
      <footer className="foot">
        <Legend />
        <Stages seconds={round.seconds} />
      </footer>
    </section>
  );
}

function Facts({ round }: { round: Round }) {
  const nodes = Math.max(0, round.nodes.length - 1);
  const what = !round.nodes.length
    ? "The prompt's last row gave the first token."
    : !nodes
      ? "No draft: one token, as in plain decoding."
      : `${nodes} drafted, ${round.accepted.length} accepted, and the bonus token.`;
  const tokens = [...round.accepted.map((node) => round.nodes[node]!.text), ...(round.bonus ? [round.bonus.text] : [])];
  return (
    <div className="facts">
      <p>
        <strong>
          {gained(round)} {gained(round) === 1 ? "token" : "tokens"}
        </strong>{" "}
        {what}
      </p>
      <p className="committed" role="img" aria-label={`Committed: ${tokens.join("")}`}>
        {tokens.map((token, i) => (
          <code key={i} className={i === round.accepted.length ? "bonus" : "accepted"} aria-hidden="true">
            {visible(token)}
          </code>
        ))}
      </p>
    </div>
  );
}

function Legend() {
  return (
    <ul className="legend" aria-label="Legend">
      <li className="root">root</li>
      <li className="accepted">accepted</li>
      <li className="bonus">bonus</li>
      <li className="rejected">rejected</li>
    </ul>
  );
}

/** Parts of a time, by stage. */
export function Stages({ seconds, label = "Time of the round" }: { seconds: Record<string, number>; label?: string }) {
  const sum = STAGES.reduce((total, stage) => total + (seconds[stage] ?? 0), 0);
  return (
    <div className="stages">
      <p>
        {label} <b>{milliseconds(sum)}</b>
      </p>
      <div className="bar" aria-hidden="true">
        {STAGES.map((stage) => (
          <i key={stage} className={stage} style={{ flexGrow: (seconds[stage] ?? 0) / (sum || 1) }} />
        ))}
      </div>
      <dl>
        {STAGES.map((stage) => (
          <div key={stage}>
            <dt className={stage}>{stage}</dt>
            <dd>{milliseconds(seconds[stage] ?? 0)}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}
