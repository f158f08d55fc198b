"use strict";
/* Several runs: in which settings they differ, beside their curves by round, seconds or bytes, smoothed, with bands over seeds. */
import { $, duration, get, keep, lasted, link, make, number, scroller, tableOf } from "./kit.js";
import { AXES, axisNeeds, band, curve, drawn, inWords, metricsOf } from "./curves.js";
import { back, paint, slider } from "./run.js";
import { differenceTable, groupsOf, keysThatDiffer, nameOf } from "./settings.js";

export const MOST = 60;
const BANDS = [["interval", "mean over seeds, 95% interval"], ["range", "mean over seeds, lowest to highest"], ["none", "every run by itself"]];
export class ComparePage {
  constructor(view, query, app) {
    const one = (name, among, otherwise) => among.includes(query.get(name)) ? query.get(name) : otherwise;
    Object.assign(this, { view, app, charts: [], ids: [...new Set(query.getAll("id"))].slice(0, MOST), metric: query.get("metric") || "", axis: one("by", Object.keys(AXES), "round"), bands: one("bands", BANDS.map(b => b[0]), "interval"), by: Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0)) });
    this.watch = this.ids;
  }
  async open() {
    document.title = "Runs compared: Mutirão";
    this.settings = await get("/api/settings", { id: this.ids });
    const first = await Promise.all(this.ids.map(id => this.app.histories.need(id, [this.metric || this.app.runs.get(id)?.judge || "loss"])));
    if (this.closed) return;
    const names = [...new Set(first.flatMap(h => metricsOf(h.names)))], judge = this.app.runs.get(this.ids[0])?.judge;
    if (!names.includes(this.metric)) this.metric = names.includes(judge) ? judge : names[0] || "";
    this.groups = groupsOf(this.ids, this.settings);
    const pick = (id, label, options, now, set) => make("label", { class: "pick" }, `${label} `, make("select", { id, onchange: e => { set(e.target.value); this.change(); } }, ...options.map(([v, t]) => make("option", { value: v, selected: v === now }, t))));
    const seeds = this.groups.some(g => g.length > 1);
    this.view.replaceChildren(back(), make("h2", {}, `${this.ids.length} runs compared`),
      make("div", { class: "acts" },
        pick("metric", "metric", names.map(n => [n, n]), this.metric, v => { this.metric = v; }),
        pick("axis", "by", [["round", "round"], ["seconds", "seconds"], ["bytes", "bytes"]], this.axis, v => { this.axis = v; }),
        seeds ? pick("bands", "seeds", BANDS, this.bands, v => { this.bands = v; }) : null,
        slider(this.by, by => { this.by = by; this.remember(); this.draw(); })),
      make("div", { class: "beside" }, make("div", { id: "compared" }),
        make("div", {}, make("h3", {}, "Settings that differ"), make("div", { id: "settings" }))),
      make("h3", {}, "Where they stand"), scroller("Compared runs", make("table", { id: "ends", class: "fixed" })));
    await this.change();
  }
  remember() { keep({ id: this.ids, metric: this.metric, by: this.axis === "round" ? "" : this.axis, bands: this.bands === "interval" ? "" : this.bands, smooth: this.by || "" }); }
  async change() {
    this.remember();
    await Promise.all(this.ids.map(id => this.app.histories.need(id, [this.metric, ...axisNeeds(this.axis)])));
    if (!this.closed) { this.columns(); this.draw(); this.ends(); }
  }
  parts() { return this.bands === "none" ? this.ids.map(id => [id]) : this.groups; }
  names() {
    const names = new Map(this.ids.map(id => [id, this.app.runs.get(id)?.name || id])), keys = keysThatDiffer(Object.values(this.settings));
    const made = this.parts().map(group => nameOf(group, names, this.settings, keys));
    return made.map((name, i) => made.indexOf(name) === i ? name : `${name}, ${names.get(this.parts()[i][0])}`);
  }
  columns() {
    const names = this.names(), table = differenceTable(this.parts().map((ids, i) => [names[i], ids]), this.settings);
    $("settings").replaceChildren(table.id ? scroller("Settings that differ", table) : table);
  }
  lines() {
    const names = this.names();
    return this.parts().map((ids, i) => {
      const of = ids.map(id => curve(this.app.histories.of.get(id), this.metric, this.axis));
      return { name: names[i], tint: i, ...(of.length > 1 ? band(of, this.bands) : of[0]) };
    });
  }
  draw() {
    const lines = this.lines(), some = lines.some(l => l.runs > 1);
    const told = some ? (this.bands === "range" ? "Mean over seeds; the band goes from the lowest to the highest run. " : "Mean over seeds; the band is Student's 95% interval of the mean. ") : "";
    const smoothed = this.by ? `Smoothed by ${this.by.toFixed(2)}, the raw values faint behind. ` : "";
    const series = lines.flatMap(({ name, tint, runs, round, ...line }) => drawn(name, line, this.by, { tint }));
    this.charts = paint($("compared"), this.charts, [{ kind: "lines", title: `${this.metric} by ${this.axis}`, about: told + smoothed + lines.slice(0, 6).map(inWords).join("; "), x: AXES[this.axis], y: { label: this.metric }, series, height: 400 }]);
  }
  ends() {
    const rows = this.ids.map(id => {
      const f = this.app.runs.get(id) || {}, h = this.app.histories.of.get(id), { y, round } = curve(h, this.metric), way = h.ways[this.metric];
      const best = y.length && way ? y.reduce((a, b) => way === "lower" ? Math.min(a, b) : Math.max(a, b)) : null;
      return [make("a", { href: link("run", { id }) }, f.name || id), f.state || "", ...[round.at(-1), y.at(-1), best].map(v => [number(v), "number"]), [duration(lasted(f)), "number"]];
    });
    const head = ["run", "state", ...["round", `last ${this.metric}`, `best ${this.metric}`, "duration"].map(t => [t, "number"])];
    $("ends").replaceChildren(...tableOf(`Last and best ${this.metric}`, head, rows).childNodes);
  }
  told() { if ($("ends") && this.groups && !this.slow) this.slow = setTimeout(() => { this.slow = 0; if (!this.closed) this.ends(); }, 500); }
  anew() { this.told(); }
  rows(id) { if (this.ids.includes(id) && $("compared") && this.groups && !this.closed) this.draw(); }
  close() { this.closed = true; clearTimeout(this.slow); }
}
