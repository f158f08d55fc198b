"use strict";
/* A study: what may be said, every method with its verdict, and its runs. */
import { link, make, number, scroller, tableOf } from "./kit.js";
import { notesBox } from "./notes.js";
import { differences } from "./rows.js";
import { ask, heading, news } from "./run.js";
import { RunTable } from "./table.js";

const between = (v, half) => `${v > 0 ? "+" : ""}${number(v)}${half === undefined ? "" : ` ± ${number(half)}`}`;
const chance = v => v === undefined ? "" : v < 0.001 ? "< 0.001" : number(Number(v.toPrecision(2)));
function verdictOf(r) {
  const parts = [r.top ? make("span", { class: "badge better" }, "best mean") : null, r.verdict ? make("span", { class: `badge ${{ better: "better", worse: "worse" }[r.verdict] || "plain"}` }, r.verdict) : null];
  return make("span", { class: "verdicts" }, ...parts);
}
function verdicts(t, baseline) {
  const right = v => [v, "number"];
  const rows = t.rows.map(r => [r.method, verdictOf(r), right(`${number(r.mean)}${r.half_t === undefined ? "" : ` ± ${number(r.half_t)}`}`), right(r.difference === undefined ? "" : between(r.difference, r.difference_half)), right(chance(r.p_t)), right(chance(r.p_holm)), right(number(r.best)), right(r.rounds_to), right(r.runs)]);
  const head = ["method", "verdict", ...["mean ± 95%", `against ${baseline || "the baseline"}`, "p", "p Holm", "best", typeof t.threshold === "number" ? `rounds to ${number(t.threshold)}` : "rounds to", "runs"].map(right)];
  return scroller(`Methods by ${t.metric}`, tableOf(`Methods by ${t.metric}`, head, rows, { class: "fixed verdict" }));
}

export class StudyPage {
  constructor(view, query, app) {
    Object.assign(this, { view, app, id: query.get("id") || "", watch: [], sort: "name", falling: false });
  }
  async open() {
    const found = await ask(this);
    if (!found) return;
    this.found = found;
    document.title = `${found.facts.name}: Mutirão`;
    this.notes = notesBox(this.id, found.notes, this.app.readonly);
    this.view.replaceChildren(...heading(found, this.app), this.notes);
    if (found.facts.state === "unreadable") return;
    for (const t of found.tables) this.view.append(make("h3", {}, `Methods by ${t.metric}, the best mean first`), verdicts(t, found.baseline));
    if (found.tables.length) this.view.append(make("p", { class: "soft" }, "Better or worse than the baseline is said only if the 95% interval of the paired difference leaves zero out (Student's t, p < 0.05); otherwise it is undecided. p Holm is corrected for the number of methods. The report has all tests."));
    this.box = make("section", { "aria-label": "Runs of this study" });
    this.progress = make("p", { class: "soft" });
    this.view.append(make("h3", {}, "Its runs"), this.progress, this.box);
    this.table?.close();
    this.table = new RunTable(this.box, {
      label: "Runs of this study", flat: true, ask: () => ({ cells: true, sort: this.sort, falling: this.falling }),
      sorted: (key, falling) => { this.sort = key; this.falling = falling; this.list(); },
      isTicked: id => this.app.ticked.has(id), ticked: (id, on) => { this.app.tick(id, on); },
    });
    this.list();
  }
  list() {
    const cells = [...this.app.runs.values()].filter(f => f.study === this.id).map(f => ({ ...f }));
    differences(cells); // among themselves
    this.table.show(cells);
    const begun = new Set(cells.map(f => f.name.split("/cells/").at(-1))), waits = (this.found.planned || []).filter(c => !begun.has(c));
    const all = make("a", { href: link("compare", { id: cells.slice(0, 60).map(f => f.id) }) }, "compare all of them");
    this.progress.replaceChildren(waits.length ? `${waits.length} more are not begun: ${waits.slice(0, 12).join(", ")}${waits.length > 12 ? " ..." : ""}. ` : "", cells.length > 1 ? all : "");
  }
  told(f) {
    if (f.id === this.id) news(this, f);
    else if (f.study === this.id) this.soon();
  }
  soon() { if (this.table && !this.slow) this.slow = setTimeout(() => { this.slow = 0; if (!this.closed) this.list(); }, 300); }
  anew() { news(this, this.app.runs.get(this.id)); this.soon(); }
  rows() {}
  close() { this.closed = true; clearTimeout(this.slow); this.table?.close(); }
}
