/* A reader puts tiles into classes. A label counts as saved when the server says that the disk has it; until then it is
   marked, sent again, and counted aloud. Text from the folder is only ever set as text. */
import { $, TOKEN, address, make, theme } from "./kit.js";
const PER = 96, MOST = 500;
let tiles = [], classes = [], labels = new Map(), index = new Map(), steps = [];
let view = [], at = 0, brush = 0, queue = [], sending = 0, trouble = "";

const picture = (i, large) => address("/api/picture", { i, ...(large ? { large: 1 } : {}) });
const ask = (path, more = {}) => fetch(path, { ...more, headers: { ...TOKEN, "Content-Type": "application/json" } });

// ---- saving ----------------------------------------------------------------------------------------------------
function put(i, label, remember = true) {
  const before = labels.get(i) || "";
  if (before === label) return;
  if (remember) steps.push([i, before]);
  label ? labels.set(i, label) : labels.delete(i);
  queue.push([i, label]);
  paint(i); tell(); send();
}
async function send() {
  if (sending || !queue.length) return;
  const batch = queue.slice(0, MOST);
  sending = batch.length;
  let wait = 0;
  try {
    const answer = await ask("/api/labels", { method: "POST", body: JSON.stringify({ changes: batch.map(([i, label]) => [tiles[i][0], label]) }) });
    if (answer.status === 403) trouble = "the server was started anew: open the address that it printed";
    else if (!answer.ok) trouble = String((await answer.json().catch(() => ({}))).detail || `the server says ${answer.status}`);
    else { trouble = ""; queue.splice(0, batch.length); }
    if (trouble) wait = 2000;
  } catch { trouble = "the server does not answer; start it again"; wait = 1000; }
  sending = 0;
  for (const [i] of batch) paint(i);
  tell();
  if (queue.length) setTimeout(send, wait);
}
function tell() {
  const said = $("saved"), left = queue.length;
  said.textContent = trouble ? `NOT SAVED: ${left} ${left === 1 ? "label" : "labels"}; ${trouble}` : left ? `saving ${left}` : "all saved";
  said.className = trouble ? "lost" : left ? "waiting" : "";
  $("done").textContent = `${labels.size} of ${tiles.length} labelled`;
  $("bar").max = tiles.length; $("bar").value = labels.size;
  $("undo").disabled = !steps.length;
  document.body.dataset.saved = labels.size - new Set(queue.map(([i]) => i).filter(i => labels.has(i))).size;
}
addEventListener("beforeunload", event => { if (queue.length) event.preventDefault(); });

// ---- the sheet -------------------------------------------------------------------------------------------------
const first = () => Math.floor(at / PER) * PER;
const button = i => document.querySelector(`#sheet button[data-i="${i}"]`);
function dress(node, i) {
  const label = labels.get(i) || "", k = classes.indexOf(label), [name, slide] = tiles[i];
  node.className = (k >= 0 ? `k${k}` : "") + (queue.some(([j]) => j === i) ? " unsaved" : "");
  node.lastChild.textContent = label;
  node.setAttribute("aria-label", `tile ${i + 1}${slide ? `, slide ${slide}` : ""}, ${name.split("/").pop()}: ${label || "no class"}`);
  const here = view[at] === i;
  node.tabIndex = here ? 0 : -1;
  here ? node.setAttribute("aria-current", "true") : node.removeAttribute("aria-current");
}
function paint(i) { const node = button(i); if (node) dress(node, i); if (view[at] === i) look(); }
let drawn = null, marked = null;
function draw() {
  const start = first(), shown = view.slice(start, start + PER), key = shown.join(), fresh = key !== drawn;
  if (fresh) {
    drawn = key;
    $("sheet").replaceChildren(...shown.map(i => {
      const node = make("button", { type: "button", "data-i": i, onclick: () => { go(view.indexOf(i)); stroke(i); } }, make("img", { src: picture(i), alt: "", loading: "lazy", width: 224, height: 224 }), make("span"));
      return make("li", {}, node);
    }));
  }
  if (fresh) for (const i of shown) dress(button(i), i);
  else for (const i of [marked, view[at]]) { const node = button(i); if (node) dress(node, i); }
  marked = view[at];
  $("none").hidden = view.length > 0;
  $("where").textContent = view.length ? `${start + 1} to ${start + shown.length} of ${view.length}` : "";
  $("before").disabled = start === 0; $("after").disabled = start + PER >= view.length;
  look();
}
let seen = null;
function look() {
  const i = view[at];
  for (const id of ["clear", "next"]) $(id).disabled = i === undefined;
  if (i === undefined) { $("large").removeAttribute("src"); $("large").alt = ""; $("name").textContent = ""; seen = null; return; }
  const [name, slide] = tiles[i], label = labels.get(i) || "no class";
  if (seen !== i) $("large").src = picture(i, true);
  seen = i;
  $("large").alt = `tile ${i + 1}, large`;
  $("name").textContent = `${label}. ${slide ? `Slide ${slide}. ` : ""}${name.split("/").pop()}`;
}
function go(to, focus = false) {
  if (!view.length) return;
  at = Math.max(0, Math.min(view.length - 1, to));
  draw();
  const node = button(view[at]);
  if (focus) node.focus({ preventScroll: true });
  node.scrollIntoView({ block: "nearest" });
}
function stroke(i) { put(i, labels.get(i) === classes[brush] ? "" : classes[brush]); }
function onward() {
  const ahead = view.findIndex((i, k) => k > at && !labels.has(i)), any = view.findIndex(i => !labels.has(i));
  return ahead >= 0 ? ahead : any >= 0 ? any : Math.min(at + 1, view.length - 1);
}
function undo() {
  const step = steps.pop();
  if (!step) return;
  const [i, before] = step;
  put(i, before, false);
  if (!view.includes(i)) { $("show").value = ""; choose(); }
  go(view.indexOf(i), true);
}
function choose() {
  const wanted = $("show").value, keep = view[at];
  view = tiles.map((_, i) => i).filter(i => !wanted || (wanted === "-" ? !labels.has(i) : labels.get(i) === wanted.slice(1)));
  at = Math.max(0, view.indexOf(keep)); drawn = null;
  draw();
}
function pick(k) {
  brush = k;
  [...$("classes").children].forEach((node, j) => node.setAttribute("aria-pressed", j === k ? "true" : "false"));
}
function columns() {
  const all = [...document.querySelectorAll("#sheet button")];
  const top = all[0]?.getBoundingClientRect().top;
  return Math.max(1, all.filter(node => node.getBoundingClientRect().top === top).length);
}

// ---- keys ------------------------------------------------------------------------------------------------------
addEventListener("keydown", event => {
  if (event.altKey || event.metaKey || event.target.closest("select, input, summary")) return;
  const key = event.key, current = view[at];
  if (event.ctrlKey) { if (key.toLowerCase() === "z") { event.preventDefault(); undo(); } return; }
  const moves = { ArrowLeft: () => at - 1, ArrowRight: () => at + 1, ArrowUp: () => at - columns(), ArrowDown: () => at + columns(), Home: () => 0, End: () => view.length - 1, PageUp: () => first() - PER, PageDown: () => first() + PER, n: onward, N: onward };
  if (moves[key]) { event.preventDefault(); const to = moves[key](); if (to >= 0 && to < view.length) go(to, true); else if (key.startsWith("Page")) go(to, true); }
  else if (current === undefined) return;
  else if (/^[1-9]$/.test(key) && classes[key - 1]) { event.preventDefault(); pick(key - 1); put(current, classes[key - 1]); go(onward(), true); }
  else if (["0", "Delete", "Backspace"].includes(key)) { event.preventDefault(); put(current, ""); }
  else if (key.toLowerCase() === "u") { event.preventDefault(); undo(); }
});
$("undo").addEventListener("click", undo);
$("clear").addEventListener("click", () => put(view[at], ""));
$("next").addEventListener("click", () => go(onward(), true));
$("before").addEventListener("click", () => go(first() - PER));
$("after").addEventListener("click", () => go(first() + PER));
$("show").addEventListener("change", choose);
theme($("theme"));

// ---- the start -------------------------------------------------------------------------------------------------
(async () => {
  try {
    const answer = await ask("/api/tiles");
    if (!answer.ok) throw new Error(await answer.text());
    const state = await answer.json();
    ({ tiles, classes } = state);
    index = new Map(tiles.map(([name], i) => [name, i]));
    labels = new Map(Object.entries(state.labels).map(([name, label]) => [index.get(name), label]));
    steps = state.steps.map(([name, before]) => [index.get(name), before]);
    document.title = `${state.reader} labels ${state.folder}`;
    $("title").textContent = `${state.folder}, read by ${state.reader}`;
    $("show").append(make("option", { value: "" }, "all tiles"), make("option", { value: "-" }, "without a class"), ...classes.map(c => make("option", { value: `=${c}` }, c)));
    $("classes").append(...classes.map((c, k) => make("button", { type: "button", class: `k${k}`, onclick: () => pick(k) }, c, make("kbd", {}, k + 1))));
    pick(0);
    view = tiles.map((_, i) => i);
    at = Math.max(0, view.findIndex(i => !labels.has(i)));
    go(at, true); tell();
  } catch (error) { $("saved").textContent = `cannot begin: ${error.message}`; $("saved").className = "lost"; }
})();
