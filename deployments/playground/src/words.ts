/** How tokens and numbers are written. */

const MARKS: Record<string, string> = { " ": "·", "\n": "⏎", "\t": "⇥" };
const LONGEST = 14;

/** A token's text with its white space made visible, cut where it is long. */
export function visible(token: string): string {
  const shown = token.replace(/[\n\t]|^ +| +$/g, (space) => [...space].map((c) => MARKS[c]).join("")) || "∅";
  return shown.length > LONGEST ? `${shown.slice(0, LONGEST - 1)}…` : shown;
}

export const percent = (x: number): string => (x > 0 && x < 0.001 ? "< 0.1 %" : `${(100 * x).toFixed(1)} %`);

export const milliseconds = (seconds: number): string => {
  const ms = 1000 * seconds;
  return `${ms < 1 ? ms.toFixed(2) : ms < 10 ? ms.toFixed(1) : ms.toFixed(0)} ms`;
};

export const decimal = (x: number | null, digits = 1): string => (x === null ? "–" : x.toFixed(digits));
