"use strict";
/* What the served pages share: elements from text alone, questions to the server, and a page's state in its address. */
export const $ = id => document.getElementById(id);
const token = new URLSearchParams(location.search).get("token") || "";
export const TOKEN = { "X-Mutirao-Token": token };

export function make(name, attrs = {}, ...inside) {
  const node = document.createElement(name);
  for (const [k, v] of Object.entries(attrs)) {
    if (k.startsWith("on")) node.addEventListener(k.slice(2), v);
    else if (v !== null && v !== undefined && v !== false) node.setAttribute(k, v === true ? "" : v);
  }
  node.append(...inside.filter(x => x !== null && x !== undefined && x !== "").map(x => x instanceof Node ? x : String(x)));
  return node;
}

// ---- the server ------------------------------------------------------------------------------------------------
export const address = (path, query = {}) => `${path}?${new URLSearchParams({ ...query, token })}`;
export function pairs(query) { // a list becomes a key that is given many times
  const out = new URLSearchParams();
  for (const [k, v] of Object.entries(query)) for (const each of Array.isArray(v) ? v : [v]) if (each !== "" && each !== null && each !== undefined) out.append(k, each);
  return out;
}
export async function get(path, query = {}) {
  const answer = await fetch(`${path}?${pairs(query)}`, { headers: TOKEN });
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).detail || `the server says ${answer.status}`);
  return answer.json();
}
export async function post(path, body) { // the answer and whether it was granted; never an exception for a refusal
  const answer = await fetch(path, { method: "POST", headers: { ...TOKEN, "Content-Type": "application/json" }, body: JSON.stringify(body) });
  return { ok: answer.ok, ...(await answer.json().catch(() => ({ detail: `the server says ${answer.status}` }))) };
}
export function events(watch) { return new EventSource(`/events?${pairs({ token, watch })}`); }

// ---- the address: #/place?key=value, so that a reload or a link shows the same -----------------------------------
export function where() {
  const [place, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { place: place || "runs", query: new URLSearchParams(query || "") };
}
export const link = (place, query = {}) => `#/${place}?${pairs(query)}`;
export function keep(query) { // change the address without a new step in the browser's history
  history.replaceState(null, "", location.pathname + location.search + link(where().place, query));
}

// ---- the colours of a page without charts; with charts, Charts.theme does it ---------------------------------------
export function theme(button) {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const tell = () => { button.textContent = dark() ? "light" : "dark"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; tell(); });
  tell();
}

// ---- words -----------------------------------------------------------------------------------------------------
export const number = v => Charts.short(v);
export const stateOf = f => f.state + (f.resumed && f.state === "running" ? " (resumed)" : "");
export function badge(f, id) { return make("span", { class: `badge ${f.state}`, id }, stateOf(f)); }
export function duration(seconds) {
  if (typeof seconds !== "number") return "";
  if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}
export const lasted = f => ["running", "waiting", "stale"].includes(f.state) && f.began ? (Date.now() - Date.parse(f.began)) / 1000 : f.seconds;
export const started = f => f.began ? f.began.slice(0, 16).replace("T", " ") : ""; // as in the trail: UTC
export const arrow = way => way === "higher" ? "↑" : way === "lower" ? "↓" : "";
export const settingsIn = pairs => pairs.map(([k, v]) => `${k} ${v}`).join(", ");
export function scroller(label, table) { return make("div", { class: "scroll whole", tabindex: 0, role: "region", "aria-label": label }, table); }
export function tableOf(caption, head, rows, attrs = {}) { // rows of cells: text, a node, or [text, class]
  const cell = (tag, c, more = {}) => Array.isArray(c) ? make(tag, { class: c[1], ...more }, c[0]) : make(tag, more, c);
  return make("table", attrs, make("caption", { class: "hush" }, caption), make("thead", {}, make("tr", {}, ...head.map(c => cell("th", c, { scope: "col" })))),
    make("tbody", {}, ...rows.map(r => make("tr", {}, ...r.map((c, i) => i ? cell("td", c) : cell("th", c, { scope: "row" }))))));
}
