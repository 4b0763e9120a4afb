/** The page. */

import { useEffect, useState } from "react";

import { type Model, model as fetchModel } from "./api";
import { Composer } from "./Composer";
import { Conversation, type Selection } from "./Conversation";
import { Engine } from "./Engine";
import { Inspector } from "./Inspector";
import { type Mode, type Settings, useSession } from "./session";

const EXAMPLES = [
  "Write a Python function that returns the n-th Fibonacci number.",
  "Count from one to twenty in words.",
  "Explain why the sky is blue to a child.",
];
const SETTINGS: Settings = { temperature: "0", top_p: "", seed: "", max_tokens: "128", budget: "auto", key: "" };

export function App() {
  const { turns, busy, ask, stop, clear } = useSession();
  const [model, setModel] = useState<Model | null>(null);
  const [mode, setMode] = useState<Mode>("speculative");
  const [settings, setSettings] = useState(SETTINGS);
  const [picked, setPicked] = useState<Selection | null>(null);
  const [engine, setEngine] = useState(false);
  const [view, setView] = useState<"chat" | "tree">("chat"); // on a small screen

  useEffect(() => {
    fetchModel(settings.key).then(setModel, () => setModel(null)); // the first question will say what is wrong
  }, [settings.key]);

  const last = turns.at(-1);
  const writing = last ? Math.max(0, last.runs.findIndex(({ state }) => state === "running")) : 0;
  const selection = picked ?? (last ? { turn: last.id, run: writing, at: null } : null);
  const run = turns.find(({ id }) => id === selection?.turn)?.runs[selection!.run] ?? null;

  function start(question: string, how: Mode = mode, before = turns) {
    setPicked(null);
    void ask(question, how, settings, before);
  }

  return (
    <div className="page" data-view={view}>
      <header className="top">
        <h1>
          <Mark />
          <span>ddtree</span> <small>{model?.id ?? "playground"}</small>
        </h1>
        <nav className="views" aria-label="View">
          <button type="button" aria-pressed={view === "chat"} onClick={() => setView("chat")}>
            Chat
          </button>
          <button type="button" aria-pressed={view === "tree"} onClick={() => setView("tree")}>
            Tree
          </button>
        </nav>
        <button type="button" className="chip" disabled={!turns.length} onClick={clear}>
          New chat
        </button>
        <button
          type="button"
          className="chip"
          aria-expanded={engine}
          aria-controls="engine"
          onClick={() => setEngine(!engine)}
        >
          Engine
        </button>
      </header>
      {engine && <Engine />}
      <main>
        <div className="talk">
          <Conversation
            turns={turns}
            busy={busy}
            selection={selection}
            onSelect={setPicked}
            onRetry={({ id, question, mode: how }) => start(question, how, turns.filter((turn) => turn.id < id))}
          >
            <Welcome onAsk={start} />
          </Conversation>
          <Composer
            model={model}
            busy={busy}
            mode={mode}
            settings={settings}
            onMode={setMode}
            onSettings={setSettings}
            onAsk={start}
            onStop={stop}
          />
        </div>
        <Inspector
          run={run}
          at={selection?.at ?? null}
          onSelect={(at) => selection && setPicked({ ...selection, at })}
        />
      </main>
    </div>
  );
}

function Welcome({ onAsk }: { onAsk: (question: string) => void }) {
  return (
    <div className="welcome">
      <h2>Watch the tree while it answers</h2>
      <p>
        Every round a drafter proposes a tree of tokens. The model verifies all of it in one pass, keeps the path it agrees
        with, and adds a token of its own. The text is exactly what it would have written alone.
      </p>
      <ul>
        {EXAMPLES.map((example) => (
          <li key={example}>
            <button type="button" onClick={() => onAsk(example)}>
              {example}
            </button>
          </li>
        ))}
      </ul>
    </div>
  );
}

function Mark() {
  return (
    <svg className="mark" viewBox="0 0 16 16" aria-hidden="true">
      <path d="M3 8h4M7 8l5-4M7 8l5 4" />
      <circle className="full" cx="3" cy="8" r="1.7" />
      <circle className="full" cx="12.4" cy="4" r="1.7" />
      <circle cx="12.4" cy="12" r="1.7" />
    </svg>
  );
}
