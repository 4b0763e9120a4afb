/** Where the nodes of a round's tree are drawn: depth to the right, siblings below each other. Knows no page. */

import { stratify, tree } from "d3-hierarchy";

import type { Round } from "./api";
import { visible } from "./words";

export const ROW = 28; // px from one node to the next below it
export const NODE = 24; // px, height of a node
const [CHARACTER, PADDING, GAP] = [7.4, 18, 30];

export type Role = "root" | "accepted" | "bonus" | "rejected";

export interface Place {
  key: number; // the node's index; that of the bonus token comes after all of them
  parent: number | null;
  text: string;
  label: string;
  role: Role;
  depth: number;
  probability: number | null; // of the bonus token there is none: the target itself drew it
  path: number | null;
  x: number;
  y: number; // of its middle
  width: number;
}

export interface Drawing {
  places: Place[]; // parents before their children
  width: number;
  height: number;
}

export function draw(round: Round): Drawing {
  const accepted = new Set(round.accepted);
  const items = round.nodes.map((node, key) => ({
    key,
    parent: node.parent,
    text: node.text,
    role: (key === 0 ? "root" : accepted.has(key) ? "accepted" : "rejected") as Role,
    probability: key ? node.probability : null,
    path: key ? Math.exp(node.score) : null,
  }));
  if (round.bonus) {
    const parent = items.length ? (round.accepted.at(-1) ?? 0) : null;
    const { text } = round.bonus;
    items.push({ key: items.length, parent, text, role: "bonus", probability: null, path: null });
  }
  if (!items.length) return { places: [], width: 0, height: 0 };

  const root = stratify<(typeof items)[number]>()
    .id(({ key }) => String(key))
    .parentId(({ parent }) => (parent === null ? null : String(parent)))(items);
  const placed = tree<(typeof items)[number]>().nodeSize([ROW, 1]).separation(() => 1)(root);
  const nodes = placed.descendants().sort((a, b) => a.data.key - b.data.key);

  const width = (text: string) => Math.max(NODE, [...visible(text)].length * CHARACTER + PADDING);
  const columns: number[] = [];
  for (const node of nodes) columns[node.depth] = Math.max(columns[node.depth] ?? 0, width(node.data.text));
  const left = columns.map((_, depth) => columns.slice(0, depth).reduce((sum, column) => sum + column + GAP, 0));
  const top = Math.min(...nodes.map(({ x }) => x));
  const bottom = Math.max(...nodes.map(({ x }) => x));
  return {
    places: nodes.map(({ data, depth, x }) => ({
      ...data,
      label: visible(data.text),
      depth,
      x: left[depth]!,
      y: x - top + ROW / 2,
      width: width(data.text),
    })),
    width: left.at(-1)! + columns.at(-1)!,
    height: bottom - top + ROW,
  };
}
