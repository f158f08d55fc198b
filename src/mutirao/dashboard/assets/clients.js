"use strict";
/* The clients of a run, a hundred at a time: the server counts, searches and sorts them. */
import { $, get, make, number, scroller, tableOf } from "./kit.js";

const ORDERS = [["lost", "most lost first"], ["selected", "most selected first"], ["last", "latest first"], ["weight", "heaviest first"], ["client", "by name"]];
const HEAD = ["client", "selected", "replied", "last round", "samples", "last weight", "group", "last failure"];
export class Clients {
  constructor(id, panel) { Object.assign(this, { id, panel, page: { q: "", sort: "lost", start: 0 } }); }
  async show() {
    const turn = this.turn = {}, found = await get("/api/clients", { id: this.id, ...this.page });
    if (this.turn !== turn) return; // a later question is on its way, and its answer may have come first
    if (!this.panel.isConnected || this.panel.dataset.tab !== "clients") return;
    if (!$("many")) this.frame();
    const right = v => [v, "number"];
    const rows = found.rows.map(c => [c.name, ...[c.selected, c.replied, c.last, c.n, number(c.weight)].map(right), c.group, c.failure ? `round ${c.failed}: ${c.failure}` : ""]);
    $("clients").replaceChildren(...tableOf("Clients", HEAD.map((t, i) => i && i < 6 ? right(t) : t), rows).childNodes);
    $("many").textContent = `${found.found} of ${found.total} clients, ${found.found ? found.start + 1 : 0} to ${Math.min(found.found, found.start + found.page)}`;
    $("before").disabled = found.start === 0; $("after").disabled = found.start + found.page >= found.found;
    this.step = found.page;
  }
  frame() {
    const turn = change => { Object.assign(this.page, change); this.show(); };
    const search = make("input", { type: "search", id: "who", placeholder: "name or failure", "aria-label": "Search clients", oninput: e => turn({ q: e.target.value, start: 0 }) });
    const sort = make("select", { "aria-label": "Order of clients", onchange: e => turn({ sort: e.target.value, start: 0 }) }, ...ORDERS.map(([v, t]) => make("option", { value: v, selected: v === this.page.sort }, t)));
    this.panel.replaceChildren(make("div", { class: "acts" }, search, sort, make("span", { id: "many", class: "soft", role: "status" })), scroller("Clients", make("table", { id: "clients" })),
      make("div", { class: "acts" }, make("button", { type: "button", id: "before", onclick: () => turn({ start: Math.max(0, this.page.start - this.step) }) }, "before"), make("button", { type: "button", id: "after", onclick: () => turn({ start: this.page.start + this.step }) }, "after")));
  }
}
