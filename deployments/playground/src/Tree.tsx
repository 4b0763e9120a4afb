/** A round's tree, drawn. Each node can be reached with the arrow keys, as in any tree. */

import { type KeyboardEvent, useLayoutEffect, useMemo, useRef, useState } from "react";

import type { Round } from "./api";
import { draw, NODE, type Place } from "./layout";
import { percent } from "./words";

const ROLES = {
  root: "root: the last round's bonus token",
  accepted: "accepted",
  bonus: "bonus: the target's own token",
  rejected: "rejected",
};

const describe = ({ text, role, probability, path }: Place): string => {
  const chances = probability === null ? "" : `, probability ${percent(probability)}, of its path ${percent(path!)}`;
  return `${JSON.stringify(text)}, ${ROLES[role]}${chances}`;
};

const curve = (from: Place, to: Place): string => {
  const [x, end] = [from.x + from.width, to.x];
  const middle = (x + end) / 2;
  return `M${x},${from.y} C${middle},${from.y} ${middle},${to.y} ${end},${to.y}`;
};

export function Tree({ round }: { round: Round }) {
  const drawing = useMemo(() => draw(round), [round]);
  const { places } = drawing;
  const [focused, setFocused] = useState(0); // the one that the tab key leads to
  const [hovered, setHovered] = useState<number | null>(null);
  const canvas = useRef<HTMLDivElement>(null);
  const items = useRef(new Map<number, HTMLElement>());
  useLayoutEffect(() => {
    const path = places.filter(({ role }) => role !== "rejected").map(({ y }) => y);
    const middle = (Math.min(...path) + Math.max(...path)) / 2;
    if (canvas.current) canvas.current.scrollTop = middle - canvas.current.clientHeight / 2;
  }, [places]);
  const shown = places[hovered ?? focused] ?? places[0];
  const path = new Set<number>();
  for (let at = shown?.key ?? null; at !== null; at = places[at]!.parent) path.add(at);

  const children = (parent: number | null) => places.filter((place) => place.parent === parent);

  function move(event: KeyboardEvent) {
    const here = places[focused]!;
    const column = places.filter(({ depth }) => depth === here.depth).sort((a, b) => a.y - b.y);
    const at = column.indexOf(here);
    const next = {
      ArrowRight: children(here.key).sort((a, b) => rank(a) - rank(b) || a.y - b.y)[0],
      ArrowLeft: here.parent === null ? undefined : places[here.parent],
      ArrowDown: column[at + 1],
      ArrowUp: column[at - 1],
      Home: places[0],
      End: places.findLast(({ role }) => role === "bonus" || role === "accepted"),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    setFocused(next.key);
    items.current.get(next.key)?.focus();
  }

  if (!shown) return null;
  return (
    <>
      <div ref={canvas} className="canvas" role="group" aria-label="Draft tree, scrollable" tabIndex={-1}>
        <div
          className="drawing"
          role="tree"
          aria-label={`Draft tree of round ${round.number}`}
          style={{ width: drawing.width, height: drawing.height }}
          onKeyDown={move}
          onMouseLeave={() => setHovered(null)}
        >
          <svg width={drawing.width} height={drawing.height} aria-hidden="true">
            {places.map((place) =>
              place.parent === null ? null : (
                <path
                  key={place.key}
                  className={`edge ${place.role} ${path.has(place.key) ? "traced" : ""}`}
                  d={curve(places[place.parent]!, place)}
                  strokeWidth={place.role === "rejected" ? 1 + 2 * (place.probability ?? 0) : 2.5}
                />
              ),
            )}
          </svg>
          {places.map((place) => {
            const siblings = children(place.parent);
            return (
              <div
                key={place.key}
                ref={(element) => {
                  if (element) items.current.set(place.key, element);
                  else items.current.delete(place.key);
                }}
                className={`node ${place.role}`}
                role="treeitem"
                aria-level={place.depth + 1}
                aria-setsize={siblings.length}
                aria-posinset={siblings.indexOf(place) + 1}
                aria-selected={place.key === focused}
                aria-label={describe(place)}
                tabIndex={place.key === focused ? 0 : -1}
                style={{ left: place.x, top: place.y - NODE / 2, width: place.width, animationDelay: `${25 * place.depth}ms` }}
                onFocus={() => setFocused(place.key)}
                onMouseEnter={() => setHovered(place.key)}
              >
                {place.label}
              </div>
            );
          })}
        </div>
      </div>
      <p className="detail">
        <code className={shown.role}>{JSON.stringify(shown.text).slice(1, -1) || "∅"}</code>{" "}
        <span>{ROLES[shown.role]}</span>
        {shown.probability !== null && (
          <>
            <span>
              <b>{percent(shown.probability)}</b> given its path
            </span>
            <span>
              <b>{percent(shown.path!)}</b> as a path
            </span>
          </>
        )}
      </p>
    </>
  );
}

/** What the eye follows first. */
const rank = ({ role }: Place): number => (role === "rejected" ? 1 : 0);
