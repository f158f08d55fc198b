"use strict";
/* Which runs a table shows and in which order: thousands of them, so what a row is searched by is made once. */
import { lasted } from "./kit.js";

export const COLUMNS = [
  ["name", "run", false], ["differs", "what differs", false], ["progress", "progress", true], ["best", "best", true],
  ["started", "started (UTC)", true], ["duration", "duration", true], ["curve", "curve", true],
]; // key, words, and whether the first click puts the largest first
const share = f => f.of ? f.rounds / f.of : 0;
const RANK = { running: 5, waiting: 5, stale: 4, finished: 3, stopped: 2, failed: 1 };

/* In what a run differs: from the others of its recipe first, then from the defaults where all of them do. */
export function differences(all) {
  const groups = new Map();
  for (const f of all) {
    if (f.kind !== "run") continue;
    if (!groups.has(f.recipe)) groups.set(f.recipe, { runs: 0, keys: new Map() });
    const group = groups.get(f.recipe);
    group.runs++;
    for (const k in f.diff) {
      if (!group.keys.has(k)) group.keys.set(k, new Map());
      const values = group.keys.get(k);
      values.set(f.diff[k], (values.get(f.diff[k]) || 0) + 1);
    }
  }
  const varies = (group, k) => group.runs === 1 || [...group.keys.get(k).values()][0] < group.runs;
  for (const f of all) {
    const group = groups.get(f.recipe), own = [], same = [];
    if (f.kind === "run") for (const k in f.diff) (varies(group, k) ? own : same).push([k, f.diff[k]]);
    own.sort((a, b) => (a[0] === "seed") - (b[0] === "seed"));
    f.own = own; f.same = same;
    f.words = f.kind === "study" ? (f.methods || []).join(", ") : own.map(p => p.join(" ")).join(", ");
    f.searched = `${f.name} ${f.recipe} ${f.why} ${f.kind} ${f.state} ${f.note || ""} ${f.words}`.toLowerCase();
  }
}

const text = new Intl.Collator(undefined, { numeric: true });
const nothing = Symbol("last, whatever the order");
const KEYS = { // what a column is sorted by; nothing goes last in either order
  progress: f => [share(f), RANK[f.state] || 0],
  best: f => typeof f.best === "number" ? [f.judge, f.way === "lower" ? -f.best : f.best] : nothing,
  started: f => f.began ? [f.began] : nothing,
  duration: f => { const s = lasted(f); return typeof s === "number" ? [s] : nothing; },
  curve: f => typeof f.value === "number" ? [f.judge, f.way === "lower" ? -f.value : f.value] : nothing,
};
function inOrder(kept, sort, falling) {
  if (sort === "name" || sort === "differs") { // letters: the collator is slow, so it sees each text once
    const of = sort === "name" ? f => f.name : f => f.words, place = new Map();
    [...new Set(kept.map(of))].sort(plain).forEach((t, i) => place.set(t, i));
    kept.sort((a, b) => place.get(of(a)) - place.get(of(b)));
    return falling ? kept.reverse() : kept;
  }
  const keys = new Map(kept.map(f => [f, KEYS[sort](f)])), sign = falling ? -1 : 1;
  return kept.sort((a, b) => {
    const x = keys.get(a), y = keys.get(b);
    if (x === nothing || y === nothing) return (x === nothing) - (y === nothing);
    for (let i = 0; i < x.length; i++) if (x[i] !== y[i]) return x[i] < y[i] ? -sign : sign;
    return 0;
  });
}
const padded = new Map();
function pad(t) { // digits made equally long: letters then compare as numbers do, a hundred times faster than a collator
  if (!padded.has(t)) padded.set(t, t.toLowerCase().replace(/\d+/g, d => d.padStart(12, "0")));
  return padded.get(t);
}
function plain(a, b) { const x = pad(a), y = pad(b); return x < y ? -1 : x > y ? 1 : text.compare(a, b); }

export function choose(all, { q = "", state = "", recipe = "", cells = false, sort = "started", falling = true, keep = new Set() }) {
  const words = q.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const kept = all.filter(f => (cells || !f.study || keep.has(f.id)) && (!state || f.state === state) && (!recipe || f.recipe === recipe) && words.every(w => f.searched.includes(w)));
  return inOrder(kept, sort, falling);
}
