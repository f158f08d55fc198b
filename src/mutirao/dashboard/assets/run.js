"use strict";
/* One run: its sentences, notes, curves that grow with every round, clients, log and configuration. */
import { $, address, badge, get, keep, make, post, stateOf } from "./kit.js";
import { Clients } from "./clients.js";
import { curve, drawn, familyOf, inWords, metricsOf } from "./curves.js";
import { notesBox } from "./notes.js";

const TABS = ["curves", "more charts", "clients", "log", "configuration"];
export const back = () => make("p", { class: "back" }, make("a", { href: sessionStorage.getItem("list") || "#/runs" }, "← all runs"));
export function figure(box, spec) {
  const about = make("p", { class: "about" }, spec.about || ""), f = make("figure", { class: "chart" }, make("figcaption", {}, spec.title), about);
  box.append(f);
  return { title: spec.title, about, chart: Charts.draw(f, spec) };
}
export function paint(box, charts, specs) { // draw, or bring what is drawn up to date; the charts that stand there now
  if (charts.length === specs.length && charts.every((d, i) => d.title === specs[i].title) && box.childElementCount) {
    charts.forEach((d, i) => { d.chart.update(specs[i]); d.about.textContent = specs[i].about; });
    return charts;
  }
  box.replaceChildren();
  if (!specs.length) box.append(make("p", { class: "soft" }, "No round has been made yet."));
  return specs.map(spec => figure(box, spec));
}
export function slider(value, changed) {
  const told = make("output", { for: "smooth" }, value ? value.toFixed(2) : "off");
  const input = make("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, value, "aria-describedby": "smoothabout", oninput: e => { const by = Number(e.target.value); told.textContent = by ? by.toFixed(2) : "off"; changed(by); } });
  return make("span", { class: "slider" }, make("label", { for: "smooth" }, "smoothing"), input, told, make("span", { id: "smoothabout", class: "hush" }, "weight of the past in an exponential moving average"));
}
export function actions(f, readonly) { // what can be done with a run or study, and taken home
  const parts = [];
  if (!readonly && f.ours && ["running", "waiting", "stale"].includes(f.state)) parts.push(make("button", { type: "button", id: "cancel", onclick: () => wish("cancel", f.id) }, "cancel"));
  if (!readonly && f.resumable && ["stopped", "failed"].includes(f.state)) parts.push(make("button", { type: "button", id: "resume", onclick: () => wish("resume", f.id) }, "resume"));
  parts.push(make("a", { href: address("/report", { id: f.id }), target: "_blank", rel: "noopener" }, "report"));
  const files = f.kind === "run" ? ["history.csv", "clients.csv", "config.toml", ...(f.state === "finished" ? ["summary.json"] : [])] : ["table.csv", "table.tex"];
  for (const name of files) parts.push(make("a", { href: address("/api/file", { id: f.id, name }), download: name }, name));
  return parts;
}
async function wish(what, id) {
  const answer = await post(`/api/${what}`, { id }).catch(error => ({ detail: error.message }));
  if ($("said")) $("said").textContent = answer.ok ? (what === "cancel" ? "asked to stop; what was done is kept" : "going on") : answer.detail;
}
export function heading(found, app) { // the top of a run's or study's page
  const f = found.facts;
  return [back(), make("h2", {}, f.name, " ", badge(f, "badge")), make("p", { id: "why", class: f.state === "failed" || f.state === "unreadable" ? "problem" : "soft" }, f.why || ""),
    f.state === "unreadable" ? null : make("div", { class: "acts", id: "acts" }, ...actions(f, app.readonly)), make("p", { id: "said", role: "status", class: "soft" }), make("ul", { class: "words" }, ...found.words.map(w => make("li", {}, w)))].filter(Boolean);
}
export function refreshHeading(f, app) {
  if (!$("badge")) return;
  $("badge").className = `badge ${f.state}`; $("badge").textContent = stateOf(f); $("why").textContent = f.why || "";
  const now = document.activeElement?.id;
  $("acts")?.replaceChildren(...actions(f, app.readonly));
  if (now && $("acts")?.querySelector(`#${CSS.escape(now)}`)) $(now).focus();
}
/* What the server knows of a page's run or study; nothing if the page was left, or has notes by now that are not saved.
   The answer may be older than what was told while it was on its way: then it is asked for again. */
export async function ask(page) {
  const { id, app } = page;
  page.asking = true;
  try {
    for (;;) {
      const before = app.runs.get(id)?.seen, found = await get("/api/run", { id }), now = app.runs.get(id);
      if (page.closed) return null;
      if (page.notes?.unsaved?.()) { page.found.facts = found.facts; refreshHeading(found.facts, app); return null; }
      if (!now || now.seen === before) return found;
      if (now.state === found.facts.state) return { ...found, facts: now };
    }
  } finally { page.asking = false; }
}
export function news(page, f) { // facts of the page's own run or study, which may be another one now
  if (!f || !page.found || page.asking) return;
  if (page.found.facts.state !== f.state && !page.notes?.unsaved?.()) { page.open(); return; }
  page.found.facts = f;
  refreshHeading(f, page.app);
}

export class RunPage {
  constructor(view, query, app) {
    Object.assign(this, { view, app, id: query.get("id") || "", tab: TABS.includes(query.get("tab")) ? query.get("tab") : "curves", by: Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0)), charts: [] });
    this.watch = [this.id];
  }
  async open() {
    const f = await ask(this);
    if (!f) return;
    this.found = f;
    this.notes = notesBox(this.id, f.notes, this.app.readonly);
    this.view.replaceChildren(...heading(f, this.app), this.notes);
    document.title = `${f.facts.name}: Mutirão`;
    if (f.facts.state === "unreadable") return;
    const tabs = make("div", { class: "tabs", role: "tablist", "aria-label": "About this run" });
    for (const name of TABS) tabs.append(make("button", { type: "button", role: "tab", "data-tab": name, "aria-controls": "panel", onclick: () => { this.tab = name; this.openTab(); } }, name));
    tabs.addEventListener("keydown", e => { const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key]; if (step) { const all = [...tabs.children]; all[(all.indexOf(document.activeElement) + step + all.length) % all.length].focus(); } });
    this.panel = make("div", { id: "panel", role: "tabpanel", tabindex: "-1" });
    this.view.append(tabs, this.panel);
    await this.openTab();
  }
  async openTab() {
    for (const b of this.view.querySelectorAll("[data-tab][role=tab]")) b.setAttribute("aria-selected", String(b.dataset.tab === this.tab));
    keep({ id: this.id, tab: this.tab === "curves" ? "" : this.tab, smooth: this.by || "" });
    const { panel, tab } = this, turn = this.turn = {}, now = () => !this.closed && this.turn === turn;
    this.charts = [];
    panel.dataset.tab = tab;
    panel.replaceChildren(make("p", { class: "soft" }, "…"));
    try {
      if (tab === "configuration") panel.replaceChildren(make("pre", { tabindex: 0 }, this.found.config));
      else if (tab === "curves") { await this.app.histories.need(this.id); if (now()) this.frame(); }
      else if (tab === "clients") { this.clients = new Clients(this.id, panel); await this.clients.show(); }
      else if (tab === "log") { const { lines } = await get("/api/log", { id: this.id }); if (now()) { panel.replaceChildren(make("pre", { id: "log", tabindex: 0 }, lines.join("\n") || "nothing was logged")); $("log").scrollTop = 1e9; } }
      else { const parts = await get("/api/charts", { id: this.id }); if (now()) this.more(parts); }
    } catch (error) { if (now()) panel.replaceChildren(make("p", { class: "problem" }, error.message)); }
  }
  frame() {
    this.panel.replaceChildren(make("div", { class: "acts" }, slider(this.by, by => { this.by = by; keep({ id: this.id, smooth: by || "" }); this.curves(); })), make("div", { class: "charts", id: "curves" }));
    this.curves();
  }
  curves() {
    if ($("curves")) this.charts = paint($("curves"), this.charts, this.specs());
  }
  specs() {
    const h = this.app.histories.of.get(this.id), judge = this.app.runs.get(this.id)?.judge, families = new Map();
    const names = metricsOf(h.names).sort((a, b) => (b === judge) - (a === judge) || a.startsWith("train_") - b.startsWith("train_"));
    for (const m of names) families.set(familyOf(m), [...(families.get(familyOf(m)) || []), m]);
    return [...families].map(([title, metrics]) => {
      const lines = metrics.map((m, i) => ({ ...curve(h, m), name: m.startsWith("train_") ? `${m.slice(6)}, in training` : m, tint: i, dash: m.startsWith("train_") ? "6 3" : "" })).filter(s => s.y.length);
      const series = lines.flatMap(({ name, tint, dash, ...line }) => drawn(name, line, this.by, { tint, dash }));
      return { kind: "lines", title, about: lines.slice(0, 3).map(inWords).join("; "), x: { label: "round", whole: true }, y: { label: "" }, series };
    }).filter(spec => spec.series.some(s => s.x.length > 1 || !spec.title.endsWith("at the clients"))); // one value at the end is in the report
  }
  more(parts) {
    this.panel.replaceChildren();
    for (const part of parts) {
      const box = make("div", { class: "charts" });
      this.panel.append(make("h3", {}, part.title), box);
      for (const spec of part.charts) figure(box, spec);
    }
    if (!parts.length) this.panel.append(make("p", { class: "soft" }, "No client has been selected yet."));
  }
  told(f) {
    if (f.id !== this.id || !this.found) return;
    news(this, f);
    if (!this.slow && ["clients", "log"].includes(this.tab)) this.slow = setTimeout(() => { this.slow = 0; if (this.tab === "clients") this.clients?.show(); else if (this.tab === "log" && !this.closed) this.openTab(); }, 3000);
  }
  anew() {
    const f = this.app.runs.get(this.id);
    if (f?.changed === this.found?.facts.changed) news(this, f);
    else if (f) this.told(f);
  }
  rows(id) { if (id === this.id && this.tab === "curves") this.curves(); }
  close() { this.closed = true; clearTimeout(this.slow); }
}
