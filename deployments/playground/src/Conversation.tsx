/** Questions and answers. The text of an answer is coloured by the round that brought it; a click shows that round. */

import { memo, type MouseEvent, useEffect, useLayoutEffect, useRef } from "react";

import { acceptanceLength, type Piece, type Run, shared, speed } from "./run";
import type { Turn } from "./session";
import { decimal } from "./words";

export interface Selection {
  turn: number;
  run: number;
  at: number | null; // which round; null: the latest
}

interface Props {
  turns: Turn[];
  busy: boolean;
  selection: Selection | null;
  onSelect: (selection: Selection) => void;
  onRetry: (turn: Turn) => void;
  children: React.ReactNode; // where nothing was said
}

export function Conversation({ turns, busy, selection, onSelect, onRetry, children }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  useLayoutEffect(() => {
    if (follows.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  });
  useEffect(() => {
    follows.current = true;
  }, [turns.length]);
  return (
    <div
      ref={box}
      className="conversation"
      role="log"
      aria-label="Conversation"
      aria-busy={busy}
      tabIndex={0}
      onScroll={({ currentTarget: { scrollHeight, scrollTop, clientHeight } }) => {
        follows.current = scrollHeight - scrollTop - clientHeight < 40;
      }}
    >
      {!turns.length && children}
      {turns.map((turn) => (
        <article key={turn.id} className="turn">
          <h2 className="question">{turn.question}</h2>
          <div className={`answers ${turn.mode}`}>
            {turn.runs.map((run, i) => (
              <Answer
                key={run.kind}
                run={run}
                selected={selection?.turn === turn.id && selection.run === i ? selection.at : undefined}
                onSelect={(at) => onSelect({ turn: turn.id, run: i, at })}
                onRetry={() => onRetry(turn)}
              />
            ))}
          </div>
          <Verdict runs={turn.runs} />
        </article>
      ))}
    </div>
  );
}

interface AnswerProps {
  run: Run;
  selected: number | null | undefined; // undefined: none of its rounds is shown
  onSelect: (at: number | null) => void;
  onRetry: () => void;
}

function Answer({ run, selected, onSelect, onRetry }: AnswerProps) {
  const name = run.kind === "plain" ? "Plain" : "Speculative";
  const pick = ({ target }: MouseEvent) => {
    const round = (target as HTMLElement).dataset["round"];
    if (round !== undefined) onSelect(Number(round));
  };
  return (
    <section className={`answer ${selected === undefined ? "" : "shown"}`} aria-label={`${name} answer`}>
      <header>
        <button type="button" aria-pressed={selected !== undefined} title="Show its rounds" onClick={() => onSelect(null)}>
          {name}
        </button>
        <dl className="figures">
          <div>
            <dd>{decimal(speed(run))}</dd>
            <dt>tokens/s</dt>
          </div>
          <div>
            <dd>{decimal(acceptanceLength(run), 2)}</dd>
            <dt>tokens/round</dt>
          </div>
          <div>
            <dd>{run.tokens}</dd>
            <dt>tokens</dt>
          </div>
        </dl>
      </header>
      {run.state === "waiting" && <p className="note">Runs next, alone, so that the figures compare.</p>}
      {run.state === "running" && !run.pieces.length && <p className="note">Reading the prompt…</p>}
      <p className="text" onClick={pick}>
        {run.pieces.map((piece, i) => (
          <Words key={i} piece={piece} index={i} selected={i === selected} />
        ))}
        {run.state === "running" && <span className="caret" aria-hidden="true" />}
      </p>
      {run.state === "stopped" && <p className="note">Stopped.</p>}
      {run.finish === "length" && <p className="note">Ended at the limit of its tokens.</p>}
      {run.error && (
        <div className="error" role="alert">
          <p>{run.error}</p>
          <button type="button" onClick={onRetry}>
            Try again
          </button>
        </div>
      )}
    </section>
  );
}

const Words = memo(function Words({ piece, index, selected }: { piece: Piece; index: number; selected: boolean }) {
  return (
    <span className={`words hue${index % 6} ${selected ? "selected" : ""}`} data-round={index}>
      {piece.text}
    </span>
  );
});

/** Of two answers: whether they are the same, and how much faster one was. */
function Verdict({ runs: [first, second] }: { runs: Run[] }) {
  if (!first || !second || first.state !== "done" || second.state !== "done") return null;
  const [fast, slow] = [speed(first), speed(second)];
  const same = shared(first, second);
  const equal = same === first.tokens && same === second.tokens;
  return (
    <p className="verdict" role="status">
      {fast && slow && <strong>{(fast / slow).toFixed(2)} × the speed</strong>}
      <span className={equal ? "equal" : "parted"}>
        {equal ? `the same ${same} tokens` : `the same tokens up to number ${same}, where rounding parts them`}
      </span>
    </p>
  );
}
