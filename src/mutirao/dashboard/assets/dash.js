"use strict";
/* The live page: which part of it is shown, the runs it knows of, and the one stream of events that keeps them up to date.
   Text from run folders is only ever set as text. */
import { $, TOKEN, events, link, make, where } from "./kit.js";
import { ComparePage, MOST } from "./compare.js";
import { Histories } from "./curves.js";
import { ListPage } from "./list.js";
import { RunPage } from "./run.js";
import { differences } from "./rows.js";
import { StudyPage } from "./study.js";

const PAGES = { runs: ListPage, run: RunPage, study: StudyPage, compare: ComparePage };
let page = null, stream = null, asked = null, tag = "", seen = 0, stale = true, sorted = [];
const app = {
  runs: new Map(), ticked: new Set(), histories: new Histories(), readonly: false, root: "Mutirão", left: 0, scrolled: 0,
  sorted() { // all facts, with what each run differs in
    if (stale) { sorted = [...app.runs.values()]; differences(sorted); stale = false; }
    return sorted;
  },
  tick(id, on) { on ? app.ticked.add(id) : app.ticked.delete(id); tray(); },
};

// ---- what is shown -----------------------------------------------------------------------------------------------
async function show() {
  const { place, query } = where(), Page = PAGES[place] || ListPage;
  page?.close();
  const mine = page = new Page($("view"), query, app);
  if (Page !== ListPage) { scrollTo(0, 0); $("view").replaceChildren(make("p", { class: "soft" }, "…")); }
  tray(); listen();
  try { await mine.open(); } catch (error) { if (page === mine) $("view").replaceChildren(make("p", {}, make("a", { href: "#/runs" }, "← all runs")), make("p", { class: "problem" }, error.message)); }
}
function tray() { // the runs that are ticked, wherever one is
  const ids = [...app.ticked].slice(0, MOST), box = $("tray");
  box.hidden = !ids.length || page instanceof ComparePage;
  const go = ids.length > 1 ? make("a", { class: "button", id: "compare", href: link("compare", { id: ids }) }, `compare ${ids.length} runs`) : make("span", { class: "soft" }, "tick one more to compare");
  box.replaceChildren(go, make("button", { type: "button", onclick: () => { app.ticked.clear(); tray(); page?.list?.(); } }, "clear"));
}
function counts() {
  const count = {};
  for (const f of app.runs.values()) if (!f.study) count[f.state] = (count[f.state] || 0) + 1;
  $("counts").textContent = Object.entries(count).map(([k, n]) => `${n.toLocaleString("en")} ${k}`).join(", ") || "no runs yet";
}

// ---- what happens ------------------------------------------------------------------------------------------------
function listen() {
  const wanted = [...page.watch].sort();
  if (stream && stream.readyState !== 2 && asked === wanted.join("\n")) return;
  asked = wanted.join("\n");
  stream?.close();
  stream = events(wanted);
  const live = (on, text) => { $("live").className = `badge ${on ? "on" : "off"}`; $("live").textContent = text; };
  let before = false;
  stream.addEventListener("hello", () => { live(true, "live"); if (before) anew(); before = true; wanted.forEach(id => app.histories.again(id).then(() => page.rows(id))); });
  stream.onerror = () => live(false, "not connected");
  stream.addEventListener("facts", e => told(JSON.parse(e.data).facts));
  stream.addEventListener("gone", e => { app.runs.delete(JSON.parse(e.data).id); stale = true; soon(); page.soon?.(); });
  stream.addEventListener("anew", anew);
  stream.addEventListener("rows", async e => { const m = JSON.parse(e.data); if (await app.histories.grow(m)) page.rows(m.id); });
}
let waiting = 0;
const soon = () => { if (!waiting) waiting = setTimeout(() => { waiting = 0; counts(); }, 300); };
function told(f) {
  const before = app.runs.get(f.id);
  f.seen = ++seen;
  app.runs.set(f.id, f);
  stale = true;
  soon();
  page.told(f, before);
}
async function anew() { // the whole list, if it is another one than we have
  const answer = await fetch("/api/runs", { headers: tag ? { ...TOKEN, "If-None-Match": tag } : TOKEN });
  if (answer.status === 304) return;
  if (!answer.ok) throw new Error(await answer.text());
  tag = answer.headers.get("etag") || "";
  const found = await answer.json();
  app.runs.clear();
  for (const f of found.runs) app.runs.set(f.id, Object.assign(f, { seen: ++seen }, found.said[f.id] && ["stopped", "failed", "new"].includes(f.state) ? { why: found.said[f.id] } : {}));
  Object.assign(app, { root: found.root, left: found.left, readonly: found.readonly });
  stale = true;
  $("root").textContent = `Mutirão: ${found.root}`;
  counts();
  if (page instanceof ListPage || page instanceof StudyPage) page.table && page.list();
  if (found.left) setTimeout(anew, 3000); // it is still reading, and says so when it has read all
}
addEventListener("hashchange", show);
Charts.theme($("theme"));
anew().then(show).catch(error => { $("view").replaceChildren(make("p", { class: "problem" }, error.message)); });
