/** Where questions are written, and how they are to be answered. */

import { type FormEvent, type KeyboardEvent, useState } from "react";

import type { Model } from "./api";
import type { Mode, Settings } from "./session";

const MODES: [Mode, string][] = [
  ["speculative", "Speculative"],
  ["plain", "Plain"],
  ["both", "Side by side"],
];

interface Props {
  model: Model | null;
  busy: boolean;
  mode: Mode;
  settings: Settings;
  onMode: (mode: Mode) => void;
  onSettings: (settings: Settings) => void;
  onAsk: (question: string) => void;
  onStop: () => void;
}

export function Composer({ model, busy, mode, settings, onMode, onSettings, onAsk, onStop }: Props) {
  const [question, setQuestion] = useState("");
  const [open, setOpen] = useState(false);

  function send(event?: FormEvent) {
    event?.preventDefault();
    if (busy || !question.trim()) return;
    onAsk(question.trim());
    setQuestion("");
  }

  function key(event: KeyboardEvent) {
    if (event.key === "Enter" && !event.shiftKey && !event.nativeEvent.isComposing) send(event);
  }

  return (
    <form className="composer" onSubmit={send} noValidate>
      {open && <Sampling model={model} settings={settings} onSettings={onSettings} />}
      <div className="ask">
        <textarea
          aria-label="Message"
          placeholder="Ask something"
          rows={2}
          value={question}
          onChange={(event) => setQuestion(event.target.value)}
          onKeyDown={key}
        />
        {busy ? (
          <button type="button" className="primary" onClick={onStop}>
            Stop
          </button>
        ) : (
          <button type="submit" className="primary" disabled={!question.trim()}>
            Send
          </button>
        )}
      </div>
      <div className="row">
        <fieldset className="modes">
          <legend className="unseen">How to answer</legend>
          {MODES.map(([value, label]) => (
            <label key={value}>
              <input type="radio" name="mode" value={value} checked={mode === value} onChange={() => onMode(value)} />
              <span>{label}</span>
            </label>
          ))}
        </fieldset>
        <button type="button" className="chip" aria-expanded={open} aria-controls="sampling" onClick={() => setOpen(!open)}>
          Sampling
        </button>
      </div>
    </form>
  );
}

function Sampling({ model, settings, onSettings }: Pick<Props, "model" | "settings" | "onSettings">) {
  const set = (name: keyof Settings) => (event: { target: { value: string } }) =>
    onSettings({ ...settings, [name]: event.target.value });
  const auto = settings.budget === "auto";
  return (
    <div className="sampling" id="sampling" role="group" aria-label="Sampling">
      <Field label="Temperature" step={0.1} value={settings.temperature} onChange={set("temperature")} />
      <Field label="Top p" step={0.05} value={settings.top_p} onChange={set("top_p")} />
      <Field label="Seed" step={1} placeholder="at random" value={settings.seed} onChange={set("seed")} />
      <Field label="Max tokens" step={16} value={settings.max_tokens} onChange={set("max_tokens")} />
      <div className="field">
        <label htmlFor="budget">
          Budget <small>{model ? `up to ${model.ddtree.max_budget}` : "nodes"}</small>
        </label>
        <span className="pair">
          <input
            id="budget"
            type="number"
            step={1}
            placeholder="auto"
            value={auto ? "" : settings.budget}
            onChange={({ target }) => onSettings({ ...settings, budget: target.value || "auto" })}
          />
          <button type="button" className="chip" aria-pressed={auto} onClick={() => onSettings({ ...settings, budget: "auto" })}>
            Auto
          </button>
        </span>
      </div>
      <label className="field">
        <span>
          API key <small>if asked for</small>
        </span>
        <input type="password" autoComplete="off" value={settings.key} onChange={set("key")} />
      </label>
    </div>
  );
}

interface FieldProps {
  label: string;
  step: number;
  value: string;
  placeholder?: string;
  onChange: (event: { target: { value: string } }) => void;
}

function Field({ label, ...input }: FieldProps) {
  return (
    <label className="field">
      <span>{label}</span>
      <input type="number" inputMode="decimal" placeholder="default" {...input} />
    </label>
  );
}
