"use strict";
/* Curves from the columns of histories: by round, seconds or bytes, smoothed, and joined over seeds. */
import { get, number } from "./kit.js";

const COUNTERS = new Set(["round", "seconds", "selected", "replied", "failed", "rejected", "bytes_down", "bytes_up", "probed", "probe_bytes", "probe_seconds", "sim_seconds", "sim_joules", "available", "waited", "clip", "drifted"]);
export const metricsOf = names => names.filter(c => !COUNTERS.has(c) && !c.endsWith("_clients"));
export const AXES = { round: { label: "round", whole: true }, seconds: { label: "seconds" }, bytes: { label: "bytes sent and received", unit: "bytes" } };
const NEEDS = { round: [], seconds: ["seconds"], bytes: ["bytes_down", "bytes_up"] };

// ---- histories, kept by columns and grown as rounds come ---------------------------------------------------------
export class Histories {
  constructor() { this.of = new Map(); this.last = new Map(); }
  after(id, act) { // in turn: an answer that is on its way may be older than what is heard meanwhile
    const done = (this.last.get(id) || Promise.resolve()).catch(() => {}).then(act);
    this.last.set(id, done);
    return done;
  }
  need(id, only = null) { return this.after(id, () => this.read(id, only)); }
  again(id) { return this.after(id, () => this.afresh(id)); } // what came between the last reading and a new stream
  grow(message) { return this.after(message.id, () => this.put(message)); } // whether anything is different now
  async read(id, only, anew = false) { // all columns, or those named and what they need
    const known = this.of.get(id);
    if (!anew && known && (!only ? known.whole : only.every(c => c in known.columns || !known.names.includes(c)))) return known;
    const wanted = only ? [...new Set(["round", ...only, ...Object.keys(known?.columns || {})])] : [];
    const found = await get("/api/history", { id, only: wanted });
    this.of.set(id, { names: found.names, columns: found.columns, ways: found.ways || {}, whole: !only });
    return this.of.get(id);
  }
  async afresh(id) {
    const known = this.of.get(id);
    if (known) await this.read(id, known.whole ? null : Object.keys(known.columns), true);
  }
  async put({ id, start, columns }) {
    const known = this.of.get(id);
    if (!known) return false;
    const have = known.columns.round?.length ?? 0;
    if (start > have || Object.keys(columns).join() !== known.names.join()) { await this.afresh(id); return true; }
    for (const name in known.columns) known.columns[name].splice(start, Infinity, ...(columns[name] || []));
    return true;
  }
}
export const axisNeeds = axis => NEEDS[axis];

// ---- one curve -------------------------------------------------------------------------------------------------
function running(values) { let sum = 0; return values.map(v => sum += v || 0); }
function along({ columns }, axis) {
  if (axis === "seconds") return running(columns.seconds || []);
  if (axis === "bytes") return running((columns.bytes_down || []).map((v, i) => (v || 0) + ((columns.bytes_up || [])[i] || 0)));
  return columns.round || [];
}
export function curve(history, metric, axis = "round") { // where the metric has values
  const xs = along(history, axis), ys = history.columns[metric] || [], rounds = history.columns.round || [], out = { x: [], y: [], round: [] };
  for (let i = 0; i < ys.length; i++) if (ys[i] !== null) { out.x.push(xs[i] ?? 0); out.y.push(ys[i]); out.round.push(rounds[i]); }
  return out;
}
/* Exponential moving average, corrected at its start: m = b m + (1 - b) y, shown m / (1 - b^t). */
export function smooth(values, by) {
  if (!by) return values;
  let mean = 0, weight = 0;
  return values.map(v => { mean = by * mean + (1 - by) * v; weight = by * weight + 1 - by; return mean / weight; });
}
/* A curve to draw, its raw values faint behind it if it is smoothed. */
export function drawn(name, line, by, extra = {}) {
  const main = { name, x: line.x, y: smooth(line.y, by), ...(line.lo ? { lo: smooth(line.lo, by), hi: smooth(line.hi, by) } : {}), ...extra };
  return by ? [{ name: `${name}, raw`, of: name, x: line.x, y: line.y, ...extra, faint: true }, { ...main, plain: true }] : [main];
}

// ---- bands over seeds ------------------------------------------------------------------------------------------
const T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042];
export const student = df => T[df - 1] ?? 1.96 + 2.46 / df; // of the 95% interval
export function band(lines, way) { // mean by round over those that have it, with min to max or Student's 95% interval of the mean
  const by = new Map();
  for (const line of lines) line.round.forEach((r, i) => { if (!by.has(r)) by.set(r, []); by.get(r).push([line.x[i], line.y[i]]); });
  const out = { x: [], y: [], lo: [], hi: [], round: [], runs: lines.length };
  for (const [r, found] of [...by].sort((a, b) => a[0] - b[0])) {
    const n = found.length, mean = found.reduce((s, p) => s + p[1], 0) / n;
    const spread = n > 1 ? Math.sqrt(found.reduce((s, p) => s + (p[1] - mean) ** 2, 0) / (n - 1)) : 0, half = n > 1 ? student(n - 1) * spread / Math.sqrt(n) : 0;
    out.round.push(r); out.x.push(found.reduce((s, p) => s + p[0], 0) / n); out.y.push(mean);
    out.lo.push(way === "range" ? Math.min(...found.map(p => p[1])) : mean - half); out.hi.push(way === "range" ? Math.max(...found.map(p => p[1])) : mean + half);
  }
  return out;
}

// ---- words -----------------------------------------------------------------------------------------------------
export const inWords = s => s.y.length ? `${s.name}: round ${s.round.at(-1)}, ${number(s.y.at(-1))}` : `${s.name}: no such value`;
export function familyOf(metric) {
  const name = metric.replace(/^train_/, "").split("@")[0].replace(/_decile$/, ""), at = name.lastIndexOf("_");
  return at > 0 && ["worst", "p10", "p50", "p90", "mean", "own"].includes(name.slice(at + 1)) ? `${name.slice(0, at)} at the clients` : name;
}
