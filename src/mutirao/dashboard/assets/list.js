"use strict";
/* The page that opens first: all runs as a table, with filters that stay in the address. */
import { $, keep, link, make, where } from "./kit.js";
import { RunTable } from "./table.js";

export class ListPage {
  constructor(view, query, app) {
    Object.assign(this, { view, app, watch: [], wish: { q: query.get("q") || "", state: query.get("state") || "", recipe: query.get("recipe") || "", cells: query.get("cells") === "1", sort: query.get("sort") || "started", falling: query.get("order") !== "rising" } });
  }
  async open() {
    document.title = `${this.app.root}: Mutirão`;
    const { wish } = this, set = (key, value) => { wish[key] = value; this.change(); };
    const search = make("input", { id: "search", type: "search", placeholder: "name, setting, note, reason", autocomplete: "off", oninput: e => set("q", e.target.value) });
    search.value = wish.q;
    const select = (id, none) => make("select", { id, oninput: e => set(id, e.target.value) }, make("option", { value: "" }, none));
    const cells = make("input", { type: "checkbox", id: "cells", oninput: e => set("cells", e.target.checked) });
    cells.checked = wish.cells;
    this.box = make("div", { id: "runs" });
    this.view.replaceChildren(make("form", { class: "filters", role: "search", onsubmit: e => e.preventDefault() },
      make("label", { class: "hush", for: "search" }, "Search runs"), search, make("label", { class: "hush", for: "state" }, "State"), select("state", "all states"), make("label", { class: "hush", for: "recipe" }, "Recipe"), select("recipe", "all recipes"),
      make("label", { class: "tick" }, cells, " runs of studies"), make("p", { id: "found", class: "soft", role: "status" })), this.box);
    this.table = new RunTable(this.box, {
      label: "Runs", ask: () => wish, sorted: (key, falling) => { wish.sort = key; wish.falling = falling; this.change(); },
      isTicked: id => this.app.ticked.has(id), ticked: (id, on) => this.app.tick(id, on),
    });
    this.list();
    if (this.app.scrolled) scrollTo(0, this.app.scrolled);
  }
  change() {
    const { q, state, recipe, cells, sort, falling } = this.wish;
    keep({ q, state, recipe, cells: cells ? "1" : "", sort: sort === "started" ? "" : sort, order: falling ? "" : "rising" });
    sessionStorage.setItem("list", location.hash);
    this.list();
  }
  list() {
    const all = this.app.sorted();
    this.wish.keep = this.app.ticked;
    this.table.show(all);
    for (const [id, none] of [["state", "all states"], ["recipe", "all recipes"]]) options($(id), [...new Set([...all.map(f => f[id]), this.wish[id]])].filter(Boolean).sort(), this.wish[id], none);
    const left = this.app.left ? `; ${this.app.left.toLocaleString("en")} more are being read` : "";
    $("found").textContent = `${this.table.kept.length.toLocaleString("en")} of ${all.length.toLocaleString("en")}${left}`;
  }
  told() { this.soon(); }
  anew() { if (this.table) this.list(); } // the whole list was read again
  soon() { if (!this.slow) this.slow = setTimeout(() => { this.slow = 0; if (!this.closed) this.list(); }, 200); }
  rows() {}
  close() { this.closed = true; this.app.scrolled = scrollY; clearTimeout(this.slow); this.table?.close(); sessionStorage.setItem("list", link("runs", Object.fromEntries(where().place === "runs" ? where().query : []))); }
}
function options(select, values, now, none) { // only if they are others: an open list stays open
  const mark = values.join("\n");
  if (select.dataset.mark === mark) return;
  select.dataset.mark = mark;
  select.replaceChildren(make("option", { value: "" }, none), ...values.map(v => make("option", { value: v }, v)));
  select.value = now;
}
