/** Prometheus' text, as far as the page reads it: sums over pods by name, and by one label. */

const LINE = /^([\w:]+)(?:\{(.*)\})? (\S+)/;

/** The values of a metric, by a label's value. */
export function byLabel(text: string, metric: string, label: string): Record<string, number> {
  const found: Record<string, number> = {};
  for (const line of text.split("\n")) {
    const [, name, labels = "", value] = LINE.exec(line) ?? [];
    if (name !== metric) continue;
    const key = new RegExp(`(?:^|,)${label}="([^"]*)"`).exec(labels)?.[1] ?? "";
    found[key] = (found[key] ?? 0) + Number(value);
  }
  return found;
}

/** The sum of a metric's values. */
export const total = (text: string, metric: string): number =>
  Object.values(byLabel(text, metric, "engine")).reduce((sum, value) => sum + value, 0);
