"use strict";
/* The table of runs. Only the rows in sight are in the document, so that five thousand are as quick as fifty. */
import { arrow, badge, duration, lasted, link, make, number, started } from "./kit.js";
import { COLUMNS, choose } from "./rows.js";

const LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
const NS = (() => { const t = document.createElement("template"); t.innerHTML = "<svg></svg>"; return t.content.firstChild.namespaceURI; })();
function svg(name, attrs) {
  const node = document.createElementNS(NS, name);
  for (const [k, v] of Object.entries(attrs)) node.setAttribute(k, v);
  return node;
}
function sparkline(f) {
  if (!f.spark) return "";
  const drawn = svg("svg", { class: "spark", viewBox: "0 0 80 24", width: 80, height: 24, role: "img", "aria-label": `${f.judge} by round, ${number(f.value)} at the end` });
  const n = f.spark.length - 1, points = [...f.spark].map((c, i) => `${(1 + i / n * 78).toFixed(1)},${(22 - LEVELS.indexOf(c) / 63 * 20).toFixed(1)}`);
  drawn.append(svg("polyline", { class: "line t0", points: points.join(" ") }));
  return drawn;
}
function differs(f) {
  if (f.kind === "study") return [make("span", {}, `study of ${f.recipe}`), f.words ? make("span", { class: "soft" }, `: ${f.words}`) : null];
  const own = f.own.map(([k, v]) => make("span", { class: "setting" }, make("span", { class: "soft" }, `${k} `), v));
  const same = f.same.length ? make("span", { class: "soft" }, `${own.length ? "; all: " : "all: "}${f.same.map(p => p.join(" ")).join(", ")}`) : null;
  return own.length || same ? [...own, same] : [make("span", { class: "soft" }, f.broken || f.state === "unreadable" ? "" : "nothing: the defaults")];
}
const titled = f => f.kind === "study" ? f.words : [...f.own, ...f.same].map(p => p.join(" = ")).join("\n");

export class RunTable {
  /* `ask` gives {q, state, recipe, cells, sort, falling}; `sorted(key, falling)` and `ticked(id, on)` are told of wishes. */
  constructor(box, { label, ask, sorted, ticked, isTicked, flat = false }) {
    Object.assign(this, { ask, isTicked, ticked, flat, kept: [], nodes: new Map(), high: 56, all: [] });
    this.heads = COLUMNS.map(([key, words, first]) => make("th", { scope: "col", role: "columnheader", "data-sort": key, class: `c-${key}` },
      make("button", { type: "button", onclick: () => { const now = ask(); sorted(key, now.sort === key ? !now.falling : first); } }, words, make("span", { class: "way", "aria-hidden": "true" }))));
    this.body = make("tbody", { role: "rowgroup" });
    this.above = make("tr", { class: "space", "aria-hidden": "true" }, make("td", { colspan: COLUMNS.length + 1 }));
    this.below = this.above.cloneNode(true);
    this.table = make("table", { class: "runs", role: "table", "aria-label": label }, make("caption", { class: "hush" }, label),
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, make("th", { scope: "col", role: "columnheader", class: "c-tick" }, make("span", { class: "hush" }, "compare")), ...this.heads)), this.body);
    this.none = make("p", { class: "soft none", hidden: true }, "No run is like that.");
    box.append(this.table, this.none);
    this.onScroll = () => { if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.paint(); }); };
    addEventListener("scroll", this.onScroll, { passive: true });
    addEventListener("resize", this.onScroll, { passive: true });
  }
  close() { removeEventListener("scroll", this.onScroll); removeEventListener("resize", this.onScroll); }

  show(all) { // the runs changed, or what is asked of them
    this.all = all;
    const wish = this.ask();
    this.kept = choose(all, wish);
    for (const th of this.heads) {
      const on = th.dataset.sort === wish.sort;
      th.setAttribute("aria-sort", on ? (wish.falling ? "descending" : "ascending") : "none");
      th.querySelector(".way").textContent = on ? (wish.falling ? " ▼" : " ▲") : "";
    }
    this.table.setAttribute("aria-rowcount", this.kept.length + 1);
    this.none.hidden = this.kept.length > 0;
    this.paint();
  }
  paint() { // put the rows in sight into the document, and keep those that are there
    if (!this.table.isConnected) return;
    const top = this.body.getBoundingClientRect().top, over = 8;
    const first = Math.max(0, Math.min(this.kept.length - 1, Math.floor(-top / this.high) - over));
    const last = Math.min(this.kept.length, Math.ceil((innerHeight - top) / this.high) + over);
    const focus = document.activeElement?.closest?.("tr[data-id]")?.dataset.id, here = new Map(), rows = [];
    for (let i = first; i < last; i++) this.row(i, here, rows);
    const held = focus !== undefined && !here.has(focus) ? this.kept.findIndex(f => f.id === focus) : -1;
    if (held >= 0) { const extra = []; this.row(held, here, extra); rows[held < first ? "unshift" : "push"](...extra); } // who reads by keyboard is not thrown out
    this.nodes = here;
    this.above.firstChild.style.height = `${first * this.high}px`;
    this.below.firstChild.style.height = `${Math.max(0, this.kept.length - last) * this.high}px`;
    place(this.body, [this.above, ...rows, this.below]);
    if (this.wide !== innerWidth && rows[0]) this.measure(rows[0]);
  }
  measure(row) { // how high a row is, once for each width of the page
    this.wide = innerWidth;
    const real = row.getBoundingClientRect().height;
    if (Math.abs(real - this.high) > 0.5) { this.high = real; this.paint(); }
  }
  row(i, here, rows) {
    const f = this.kept[i], mark = `${f.seen}|${f.words}|${f.same.length}|${this.isTicked(f.id)}`, known = this.nodes.get(f.id);
    const node = known && known.mark === mark ? known.node : this.line(f, known?.node);
    if (known?.node !== node || known.i !== i) node.setAttribute("aria-rowindex", i + 2);
    here.set(f.id, { node, mark, i });
    rows.push(node);
  }
  line(f, old) {
    const tick = make("input", { type: "checkbox", "aria-label": `compare ${f.name}`, onchange: e => this.ticked(f.id, e.target.checked) });
    tick.checked = this.isTicked(f.id); tick.disabled = f.kind === "study" || f.state === "unreadable";
    const of = f.of || f.rounds, share = f.kind === "study" ? `${f.rounds} of ${f.of} runs` : `${f.rounds}${of ? ` of ${of}` : ""}${of < 1e5 ? " rounds" : ""}`; // of more the figures alone have room
    const bar = make("span", { class: "bar-of", "aria-hidden": "true" }, make("span", { class: f.state }));
    bar.firstChild.style.width = `${of ? Math.min(100, 100 * f.rounds / of) : 0}%`;
    const name = make("a", { href: link(f.kind, { id: f.id }) }, this.flat ? f.name.split("/cells/").at(-1) : f.name);
    const best = typeof f.best === "number" ? [make("span", { class: "big" }, number(f.best)), make("span", { class: "soft" }, ` ${f.judge}${arrow(f.way) && ` ${arrow(f.way)}`}`), f.winner ? make("span", { class: "soft line2" }, f.winner) : null] : [];
    const td = (key, ...inside) => make("td", { role: "cell", class: `c-${key}`, title: key === "differs" ? titled(f) : null }, make("div", {}, ...inside));
    const row = make("tr", { role: "row", "data-id": f.id },
      make("td", { role: "cell", class: "c-tick" }, tick),
      make("th", { scope: "row", role: "rowheader", class: "c-name" }, make("div", {}, name, f.note ? make("span", { class: "note", title: f.note }, f.note) : f.kind === "run" ? make("span", { class: "note soft" }, f.recipe) : null)),
      td("differs", ...(f.why ? [make("span", { class: f.broken || ["failed", "unreadable"].includes(f.state) ? "problem" : "soft" }, `${f.why} `)] : []), ...differs(f)),
      td("progress", badge(f), bar, make("span", { class: "soft" }, share)),
      td("best", ...best), td("started", started(f)), td("duration", duration(lasted(f))), td("curve", sparkline(f)));
    if (old?.contains(document.activeElement)) { // somebody stands on it: hand the place over
      const tag = document.activeElement.tagName;
      queueMicrotask(() => row.querySelector(tag.toLowerCase())?.focus({ preventScroll: true }));
    }
    return row;
  }
}
function place(body, wanted) { // what goes first: a row that stays must not be moved, or it is laid out anew
  const stays = new Set(wanted);
  for (const node of [...body.children]) if (!stays.has(node)) node.remove();
  let at = body.firstChild;
  for (const node of wanted) {
    if (node === at) at = at.nextSibling;
    else body.insertBefore(node, at);
  }
}
