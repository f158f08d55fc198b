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
let page = null, stream = null, asked = null, seen = 0, stale = true, sorted = [];
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
  const curves = () => wanted.forEach(id => app.histories.again(id).then(() => page.rows(id)));
  stream.addEventListener("hello", e => { // what changed before it is not told by this stream
    live(true, "live");
    if (JSON.parse(e.data).version === have) page.anew();
    else refresh();
    curves();
  });
  stream.onerror = () => live(false, "not connected");
  for (const name of ["facts", "gone"]) stream.addEventListener(name, e => heard(JSON.parse(e.data)));
  stream.addEventListener("anew", () => { refresh(); curves(); });
  stream.addEventListener("rows", async e => { const m = JSON.parse(e.data); if (await app.histories.grow(m)) page.rows(m.id); });
}
let waiting = 0;
const soon = () => { if (!waiting) waiting = setTimeout(() => { waiting = 0; counts(); }, 300); };

/* The server numbers the versions of its list, and every change says which version it makes. Nothing is missed as long as
   changes are put into a list that is older than they are: those that come while a list is on its way wait for it. */
let have = "", listed = "", tag = "", due = true, reading = null; // `due`: what we have may lack a change
let late = [];
const place = version => Number(version.split("-")[1]);
function heard(message) {
  if (due || reading) late.push(message);
  else put(message);
}
function put({ version, facts, id }) {
  if (place(version) <= place(listed)) return; // the list was read after it
  have = version;
  stale = true;
  soon();
  if (facts) { app.runs.set(facts.id, Object.assign(facts, { seen: ++seen })); page.told(facts); }
  else { app.runs.delete(id); page.soon?.(); }
}
function anew() { // one list at a time, or an older answer could be the last; who asks meanwhile gets another one
  due = true;
  reading ??= catchUp().finally(() => { reading = null; });
  return reading;
}
function refresh() { anew().catch(() => setTimeout(refresh, 3000)); }
async function catchUp() {
  while (due) {
    due = false;
    await list().catch(error => { due = true; throw error; });
  }
  const waited = late;
  late = [];
  for (const message of waited) put(message);
}
async function list() { // if it is another one than we have
  const answer = await fetch("/api/runs", { headers: tag ? { ...TOKEN, "If-None-Match": tag } : TOKEN });
  if (answer.status === 304) { have = listed; return; }
  if (!answer.ok) throw new Error(await answer.text());
  tag = answer.headers.get("etag") || "";
  const found = await answer.json();
  have = listed = found.version;
  app.runs.clear();
  for (const f of found.runs) app.runs.set(f.id, Object.assign(f, { seen: ++seen }, found.said[f.id] && ["stopped", "failed", "new"].includes(f.state) ? { why: found.said[f.id] } : {}));
  Object.assign(app, { root: found.root, left: found.left, readonly: found.readonly });
  stale = true;
  $("root").textContent = `Mutirão: ${found.root}`;
  counts();
  page?.anew();
  if (found.left) setTimeout(refresh, 3000); // it is still reading, and says so when it has read all
}
addEventListener("hashchange", show);
Charts.theme($("theme"));
anew().then(show).catch(error => { $("view").replaceChildren(make("p", { class: "problem" }, error.message)); });
