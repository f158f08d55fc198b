"use strict";
/* The live page: a list of runs, one run or several compared, kept up to date by one stream of events.
   Text from run folders is only ever set as text. */
(() => {
  const $ = id => document.getElementById(id);
  const token = new URLSearchParams(location.search).get("token") || "";
  const runs = new Map(), rows = new Map(), ticked = new Set();
  let chosen = null, tab = "curves", shown = 150, stream = null, drawn = [], page = { q: "", sort: "lost", start: 0 };

  const make = (name, attrs = {}, ...inside) => {
    const node = document.createElement(name);
    for (const [k, v] of Object.entries(attrs)) {
      if (k.startsWith("on")) node.addEventListener(k.slice(2), v);
      else if (v !== null && v !== undefined && v !== false) node.setAttribute(k, v === true ? "" : v);
    }
    node.append(...inside.filter(x => x !== null && x !== undefined).map(x => x instanceof Node ? x : String(x)));
    return node;
  };
  const address = (path, query = {}) => `${path}?${new URLSearchParams({ ...query, token })}`;
  async function get(path, query = {}) {
    const answer = await fetch(`${path}?${new URLSearchParams(query)}`, { headers: { "X-Mutirao-Token": token } });
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).detail || `the server says ${answer.status}`);
    return answer.json();
  }
  async function wish(what, id) {
    const say = $("said");
    try {
      const answer = await fetch(`/api/${what}`, { method: "POST", headers: { "X-Mutirao-Token": token, "Content-Type": "application/json" }, body: JSON.stringify({ id }) });
      if (!answer.ok) throw new Error((await answer.json()).detail);
      if (say) say.textContent = what === "cancel" ? "asked to stop; what was done is kept" : "going on";
    } catch (error) { if (say) say.textContent = error.message; }
  }

  // ---- the list ------------------------------------------------------------------------------------------------
  const number = v => Charts.short(v);
  const stateOf = f => f.state + (f.resumed && f.state === "running" ? " (resumed)" : "");
  function matches(f) {
    const text = $("search").value.trim().toLowerCase(), state = $("state").value;
    if (!$("cells").checked && f.study && !ticked.has(f.id)) return false;
    if (state && f.state !== state) return false;
    return !text || text.split(/\s+/).every(w => `${f.name} ${f.recipe} ${f.why} ${f.kind} ${f.state}`.toLowerCase().includes(w));
  }
  const ORDERS = {
    changed: (a, b) => (a.changed < b.changed ? 1 : a.changed > b.changed ? -1 : a.name < b.name ? -1 : 1),
    name: (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }),
    value: (a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity),
  };
  function line(f) {
    const tick = make("input", { type: "checkbox", "aria-label": `compare ${f.name}`, onchange: e => { e.target.checked ? ticked.add(f.id) : ticked.delete(f.id); compareOrChosen(); } });
    tick.checked = ticked.has(f.id); tick.disabled = f.kind === "study";
    const best = f.judge && typeof f.value === "number" ? `${f.judge} ${number(f.value)}` : "";
    const open = make("button", { type: "button", "aria-current": chosen === f.id ? "true" : null, onclick: () => choose(f.id) },
      make("span", { class: "title" }, make("b", {}, f.name), make("span", { class: `badge ${f.state}` }, stateOf(f))),
      make("span", { class: "facts" }, make("span", {}, f.kind === "study" ? `study of ${f.recipe}` : f.recipe), make("span", {}, f.kind === "study" ? `${f.rounds} of ${f.of} runs` : `round ${f.rounds} of ${f.of}`), best ? make("span", {}, best) : null, f.why ? make("span", { class: f.state === "failed" || f.state === "stopped" ? "bad" : "" }, f.why) : null));
    return make("li", { class: chosen === f.id ? "chosen" : null, "data-id": f.id }, tick, open);
  }
  function list() {
    const kept = [...runs.values()].filter(matches).sort(ORDERS[$("sort").value]);
    const focus = document.activeElement?.closest?.("#runs li")?.dataset.id, where = document.activeElement?.tagName;
    $("runs").replaceChildren(...kept.slice(0, shown).map(line));
    if (focus) [...$("runs").children].find(li => li.dataset.id === focus)?.querySelector(where.toLowerCase())?.focus({ preventScroll: true });
    $("more").hidden = kept.length <= shown;
    $("found").textContent = `${kept.length} of ${runs.size}`;
    const count = {};
    for (const f of runs.values()) if (!f.study) count[f.state] = (count[f.state] || 0) + 1;
    $("counts").textContent = Object.entries(count).map(([k, n]) => `${n} ${k}`).join(", ") || "no runs yet";
  }
  let waiting = 0;
  const listSoon = () => { if (!waiting) waiting = setTimeout(() => { waiting = 0; list(); }, 100); };

  // ---- curves from rows ----------------------------------------------------------------------------------------
  const COUNTERS = new Set(["round", "seconds", "selected", "replied", "failed", "rejected", "bytes_down", "bytes_up", "probed", "probe_bytes", "probe_seconds", "sim_seconds", "sim_joules", "available"]);
  const metricsOf = h => h.columns.filter(c => !COUNTERS.has(c) && !c.endsWith("_clients"));
  const familyOf = m => {
    const name = m.replace(/^train_/, "").split("@")[0].replace(/_decile$/, ""), at = name.lastIndexOf("_");
    return at > 0 && ["worst", "p10", "p50", "p90", "mean", "own"].includes(name.slice(at + 1)) ? `${name.slice(0, at)} at the clients` : name;
  };
  function series(h, metric, name, extra = {}) {
    const at = h.columns.indexOf(metric), r = h.columns.indexOf("round"), x = [], y = [];
    if (at >= 0) for (const row of h.rows) if (row[at] !== null) { x.push(row[r]); y.push(row[at]); }
    return { name, x, y, ...extra };
  }
  const inWords = s => s.y.length ? `${s.name}: round ${s.x.at(-1)}, ${number(s.y.at(-1))}` : `${s.name}: no such value`;
  function curvesOf(h) {
    const families = new Map(), judge = runs.get(chosen)?.judge;
    const names = metricsOf(h).sort((a, b) => (b === judge) - (a === judge) || a.startsWith("train_") - b.startsWith("train_"));
    for (const m of names) families.set(familyOf(m), [...(families.get(familyOf(m)) || []), m]);
    return [...families].map(([title, metrics]) => {
      const lines = metrics.map((m, i) => series(h, m, m.startsWith("train_") ? `${m.slice(6)}, in training` : m, { tint: i, dash: m.startsWith("train_") ? "6 3" : "" }));
      return { kind: "lines", title, about: lines.slice(0, 3).map(inWords).join("; "), x: { label: "round", whole: true }, y: { label: "" }, series: lines };
    });
  }
  async function need(id) {
    if (!rows.has(id)) rows.set(id, await get("/api/history", { id }));
    return rows.get(id);
  }
  function paint(box, specs) { // draw, or bring what is drawn up to date
    if (drawn.length === specs.length && drawn.every((d, i) => d.title === specs[i].title) && box.isConnected && box.childElementCount) {
      drawn.forEach((d, i) => { d.chart.update(specs[i]); d.about.textContent = specs[i].about; });
      return;
    }
    box.replaceChildren();
    drawn = specs.map(spec => figure(box, spec));
    if (!specs.length) box.append(make("p", { class: "soft" }, "No round has been made yet."));
  }
  function figure(box, spec) {
    const about = make("p", { class: "about" }, spec.about || ""), f = make("figure", { class: "chart" }, make("figcaption", {}, spec.title), about);
    box.append(f);
    return { title: spec.title, about, chart: Charts.draw(f, spec) };
  }

  // ---- one run -------------------------------------------------------------------------------------------------
  async function choose(id, keepTab) {
    chosen = id; ticked.size > 1 && ticked.clear();
    if (!keepTab) tab = "curves";
    document.body.classList.add("open");
    history.replaceState(null, "", `${location.search}#${encodeURIComponent(id)}`);
    list(); listen();
    await showChosen();
    if (matchMedia("(max-width: 56rem)").matches) $("view").focus();
  }
  function compareOrChosen() { list(); listen(); if (ticked.size > 1) { document.body.classList.add("open"); compare(); } else if (chosen) showChosen(); else empty(); }
  function empty() { drawn = []; $("view").replaceChildren(make("p", { class: "soft" }, ticked.size ? "Tick one more to compare." : "Choose a run, or tick two or more to compare them.")); }
  const back = () => make("button", { class: "back", type: "button", onclick: () => { document.body.classList.remove("open"); } }, "← all runs");

  async function showChosen() {
    const id = chosen, view = $("view");
    let found;
    try { found = await get("/api/run", { id }); } catch (error) { view.replaceChildren(back(), make("p", { class: "problem" }, error.message)); return; }
    if (id !== chosen || ticked.size > 1) return;
    drawn = [];
    const f = found.facts;
    view.replaceChildren(back(), make("h2", {}, f.name, " ", make("span", { class: `badge ${f.state}`, id: "badge" }, stateOf(f))), make("p", { id: "why", class: "problem" }, f.why || ""), make("div", { class: "acts", id: "acts" }), make("p", { id: "said", role: "status", class: "soft" }), make("ul", { class: "words" }, ...found.words.map(w => make("li", {}, w))));
    acts(f);
    if (f.kind === "study") { cells(view, found.cells); return; }
    const tabs = make("div", { class: "tabs", role: "tablist", "aria-label": "About this run" }), panel = make("div", { id: "panel", role: "tabpanel", tabindex: "-1" });
    for (const name of ["curves", "more charts", "clients", "log", "configuration"])
      tabs.append(make("button", { type: "button", role: "tab", "data-tab": name, "aria-controls": "panel", "aria-selected": String(name === tab), onclick: () => { tab = name; openTab(found); } }, name));
    view.append(tabs, panel);
    await openTab(found);
  }
  function acts(f) {
    const box = $("acts");
    if (!box) return;
    const parts = [];
    if (f.ours && (f.state === "running" || f.state === "waiting")) parts.push(make("button", { type: "button", id: "cancel", onclick: () => wish("cancel", f.id) }, "cancel"));
    if (f.resumable && ["stopped", "failed"].includes(f.state)) parts.push(make("button", { type: "button", id: "resume", onclick: () => wish("resume", f.id) }, "resume"));
    parts.push(make("a", { href: address("/report", { id: f.id }), target: "_blank", rel: "noopener" }, "report"));
    for (const name of f.kind === "run" ? ["history.csv", "clients.csv", "config.toml", ...(f.state === "finished" ? ["summary.json"] : [])] : ["table.csv", "table.tex"]) parts.push(make("a", { href: address("/api/file", { id: f.id, name }), download: name }, name));
    const now = document.activeElement?.id;
    box.replaceChildren(...parts);
    if (now && box.querySelector(`#${CSS.escape(now)}`)) $(now).focus();
  }
  function cells(view, found) {
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...["run", "state", "round", "value"].map(t => make("th", { scope: "col" }, t)))));
    const body = make("tbody");
    for (const c of found) body.append(make("tr", {}, make("td", {}, make("button", { type: "button", onclick: () => choose(c.id) }, c.name)), make("td", {}, c.state), make("td", { class: "number" }, `${c.rounds} of ${c.of}`), make("td", { class: "number" }, typeof c.value === "number" ? `${c.judge} ${number(c.value)}` : "")));
    table.append(body);
    view.append(make("p", { class: "soft" }, "Tick runs in the list (cells of studies) to compare them; the report has the table with intervals and tests."), make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Runs of this study" }, table));
  }
  async function openTab(found) {
    for (const b of document.querySelectorAll("[data-tab]")) b.setAttribute("aria-selected", String(b.dataset.tab === tab));
    const panel = $("panel"), id = chosen, now = tab;
    drawn = [];
    if (tab === "configuration") { panel.replaceChildren(make("pre", { tabindex: 0 }, found.config)); return; }
    panel.replaceChildren(make("p", { class: "soft" }, "…"));
    try {
      if (tab === "curves") { const h = await need(id); if (id === chosen && now === tab) { panel.replaceChildren(make("div", { class: "charts", id: "curves" })); paint($("curves"), curvesOf(h)); } }
      else if (tab === "clients") await clients(panel);
      else if (tab === "log") { const { lines } = await get("/api/log", { id }); panel.replaceChildren(make("pre", { id: "log", tabindex: 0 }, lines.join("\n") || "nothing was logged")); $("log").scrollTop = 1e9; }
      else await moreCharts(panel, id);
    } catch (error) { panel.replaceChildren(make("p", { class: "problem" }, error.message)); }
  }
  async function moreCharts(panel, id) {
    const parts = await get("/api/charts", { id });
    if (id !== chosen || tab !== "more charts") return;
    panel.replaceChildren();
    for (const part of parts) {
      const box = make("div", { class: "charts" });
      panel.append(make("h3", {}, part.title), box);
      for (const spec of part.charts) figure(box, spec);
    }
    if (!parts.length) panel.append(make("p", { class: "soft" }, "No client has been selected yet."));
  }
  async function clients(panel) {
    const id = chosen, found = await get("/api/clients", { id, ...page });
    if (id !== chosen || tab !== "clients") return;
    if (!$("clients")) {
      const search = make("input", { type: "search", id: "who", placeholder: "name or failure", "aria-label": "Search clients", oninput: e => { page = { ...page, q: e.target.value, start: 0 }; clients(panel); } });
      search.value = page.q;
      const sort = make("select", { "aria-label": "Order of clients", onchange: e => { page = { ...page, sort: e.target.value, start: 0 }; clients(panel); } }, ...[["lost", "most lost first"], ["selected", "most selected first"], ["last", "latest first"], ["weight", "heaviest first"], ["client", "by name"]].map(([v, t]) => make("option", { value: v, selected: v === page.sort }, t)));
      panel.replaceChildren(make("div", { class: "acts" }, search, sort, make("span", { id: "many", class: "soft", role: "status" })), make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Clients" }, make("table", { id: "clients" })), make("div", { class: "acts" }, make("button", { type: "button", id: "before", onclick: () => { page.start = Math.max(0, page.start - found.page); clients(panel); } }, "before"), make("button", { type: "button", id: "after", onclick: () => { page.start += found.page; clients(panel); } }, "after")));
    }
    const head = ["client", "selected", "replied", "last round", "samples", "last weight", "group", "last failure"];
    const body = make("tbody");
    for (const c of found.rows) body.append(make("tr", {}, make("td", {}, c.name), ...[c.selected, c.replied, c.last, c.n, number(c.weight)].map(v => make("td", { class: "number" }, v)), make("td", {}, c.group), make("td", {}, c.failure ? `round ${c.failed}: ${c.failure}` : "")));
    $("clients").replaceChildren(make("caption", { class: "hush" }, "Clients"), make("thead", {}, make("tr", {}, ...head.map(t => make("th", { scope: "col" }, t)))), body);
    $("many").textContent = `${found.found} of ${found.total} clients, ${found.found ? found.start + 1 : 0} to ${Math.min(found.found, found.start + found.page)}`;
    $("before").disabled = found.start === 0; $("after").disabled = found.start + found.page >= found.found;
  }

  // ---- several runs --------------------------------------------------------------------------------------------
  let metric = "";
  async function compare() {
    const ids = [...ticked].slice(0, 24), view = $("view");
    await Promise.all(ids.map(need));
    if (ticked.size < 2) return;
    const names = [...new Set(ids.flatMap(id => metricsOf(rows.get(id))))];
    if (!names.includes(metric)) metric = runs.get(ids[0])?.judge && names.includes(runs.get(ids[0]).judge) ? runs.get(ids[0]).judge : names[0] || "";
    drawn = [];
    const pick = make("select", { "aria-label": "Metric", id: "metric", onchange: e => { metric = e.target.value; paintCompare(ids); } }, ...names.map(n => make("option", { value: n, selected: n === metric }, n)));
    view.replaceChildren(back(), make("h2", {}, `${ids.length} runs compared`), make("div", { class: "acts" }, pick, make("button", { type: "button", onclick: () => { ticked.clear(); compareOrChosen(); } }, "clear")), make("div", { class: "charts", id: "curves" }), make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Compared runs" }, make("table", { id: "ends" })));
    paintCompare(ids);
  }
  const way = (m, f) => f.directions?.[m] || f.directions?.[m.replace(/^train_/, "")];
  function paintCompare(ids) {
    const lines = ids.map((id, i) => series(rows.get(id), metric, runs.get(id)?.name || id, { tint: i }));
    paint($("curves"), [{ kind: "lines", title: `${metric} by round`, about: lines.slice(0, 6).map(inWords).join("; "), x: { label: "round", whole: true }, y: { label: metric }, series: lines, height: 380 }]);
    const body = make("tbody");
    lines.forEach((s, i) => { const f = runs.get(ids[i]) || {}; body.append(make("tr", {}, make("td", {}, s.name), make("td", {}, f.state || ""), ...[s.x.at(-1), s.y.at(-1), s.y.length && way(metric, f) ? (way(metric, f) === "lower" ? Math.min : Math.max)(...s.y) : null].map(v => make("td", { class: "number" }, number(v))))); });
    $("ends").replaceChildren(make("caption", { class: "hush" }, `Last and best ${metric}`), make("thead", {}, make("tr", {}, ...["run", "state", "round", `last ${metric}`, `best ${metric}`].map(t => make("th", { scope: "col" }, t)))), body);
  }

  // ---- what happens --------------------------------------------------------------------------------------------
  let asked = "", slow = 0;
  function listen() {
    const wanted = [...new Set([...(ticked.size > 1 ? ticked : []), ...(chosen ? [chosen] : [])])].slice(0, 24).sort();
    if (stream && stream.readyState !== 2 && asked === wanted.join("\n")) return;
    asked = wanted.join("\n");
    stream?.close();
    const query = new URLSearchParams({ token });
    wanted.forEach(id => query.append("watch", id));
    stream = new EventSource(`/events?${query}`);
    const live = (on, text) => { $("live").className = `badge ${on ? "on" : "off"}`; $("live").textContent = text; };
    let before = false;
    stream.addEventListener("hello", () => { live(true, "live"); if (before) anew(); before = true; wanted.forEach(refetch); });
    stream.onerror = () => live(false, "not connected");
    stream.addEventListener("facts", e => told(JSON.parse(e.data).facts));
    stream.addEventListener("gone", e => { runs.delete(JSON.parse(e.data).id); listSoon(); });
    stream.addEventListener("anew", anew);
    stream.addEventListener("rows", e => grow(JSON.parse(e.data)));
  }
  async function refetch(id) { // rows that came between the last reading and this stream
    if (!rows.has(id)) return;
    rows.set(id, await get("/api/history", { id }));
    redraw(id);
  }
  function told(f) {
    const before = runs.get(f.id);
    runs.set(f.id, f);
    listSoon();
    if (f.id === chosen && ticked.size < 2) {
      if (before && before.state !== f.state) { showChosen(); return; }
      if ($("badge")) { $("badge").className = `badge ${f.state}`; $("badge").textContent = stateOf(f); $("why").textContent = f.why || ""; }
      if (!slow && tab !== "curves" && tab !== "configuration") slow = setTimeout(() => { slow = 0; if (tab === "clients" && $("clients")) clients($("panel")); else if (tab === "log" && $("log")) openTab({}); }, 3000);
    }
  }
  function grow(m) {
    const h = rows.get(m.id);
    if (!h) return;
    if (m.start > h.rows.length || m.columns.join() !== h.columns.join() && m.start) { rows.delete(m.id); need(m.id).then(() => redraw(m.id)); return; }
    h.columns = m.columns;
    h.rows.splice(m.start, Infinity, ...m.rows);
    redraw(m.id);
  }
  function redraw(id) {
    if (ticked.size > 1) { if (ticked.has(id) && $("ends")) paintCompare([...ticked].slice(0, 24)); }
    else if (id === chosen && tab === "curves" && $("curves")) paint($("curves"), curvesOf(rows.get(id)));
  }
  async function anew() {
    const found = await get("/api/runs");
    runs.clear();
    for (const f of found.runs) runs.set(f.id, f);
    $("root").textContent = `Mutirão: ${found.root}`;
    document.title = `${found.root}: Mutirão`;
    list();
  }
  for (const id of ["search", "state", "sort", "cells"]) $(id).addEventListener("input", () => { shown = 150; list(); });
  $("more").addEventListener("click", () => { shown += 500; list(); });
  Charts.theme($("theme"));
  anew().then(() => { const id = decodeURIComponent(location.hash.slice(1)); if (runs.has(id)) choose(id); else listen(); }).catch(error => { $("found").textContent = error.message; });
})();
