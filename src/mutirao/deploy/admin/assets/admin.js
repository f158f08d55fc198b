/* The pages of a server and of a site. Facts come as JSON every few seconds while the page is in sight; a part is drawn
   anew only if it changed, so that nobody loses the place. Text from elsewhere is only ever set as text. */
import { $, TOKEN, make, theme } from "./kit.js";
const page = document.body.dataset.page, PAUSE = 4000;
let drawn = {}, timer = 0, looks = 0;

async function call(path, content) {
  const headers = { ...TOKEN, "Content-Type": "application/json" };
  const answer = await fetch(path, content ? { method: "POST", headers, body: JSON.stringify(content) } : { headers });
  if (answer.ok) return answer.json();
  const text = await answer.text();
  let said = text;
  try { said = JSON.parse(text).detail; } catch { /* one line of plain text */ }
  throw new Error(said || `the page's server says ${answer.status}`);
}
const say = (text, bad = false) => { $("said").textContent = text; $("said").className = bad ? "problem" : ""; };

// ---- words ---------------------------------------------------------------------------------------------------
const two = n => String(n).padStart(2, "0");
const when = text => {
  const d = text ? new Date(text) : null;
  if (!d || isNaN(d)) return "";
  return make("time", { datetime: text, title: text }, `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${two(d.getHours())}:${two(d.getMinutes())}`);
};
const size = n => n < 1e3 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toPrecision(3)} kB` : n < 1e9 ? `${(n / 1e6).toPrecision(3)} MB` : `${(n / 1e9).toPrecision(3)} GB`;
const short = n => n === null || n === undefined ? "infinite" : Number(n.toPrecision(3)).toString();
const badge = (text, kind) => make("span", { class: `badge ${kind}` }, text);
const few = names => names.length > 4 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");

// ---- parts ---------------------------------------------------------------------------------------------------
function part(id, facts, draw) {
  const text = JSON.stringify(facts);
  if (drawn[id] === text) return;
  drawn[id] = text;
  const held = document.activeElement?.closest?.(`#${id}`) ? document.activeElement.dataset.key : null;
  $(id).replaceChildren(...draw(facts));
  if (held) [...$(id).querySelectorAll("[data-key]")].find(n => n.dataset.key === held)?.focus();
}
function table(id, name, columns, rows, empty) {
  if (!rows.length) return [make("p", { class: "soft" }, empty)];
  $(id).dataset.name = name;
  const head = make("thead", {}, make("tr", {}, ...columns.map(c => make("th", { scope: "col" }, c))));
  const line = cells => make("tr", {}, ...cells.map((c, i) => {
    const inside = Array.isArray(c) ? c : [c];
    return i ? make("td", { "data-label": columns[i] }, ...inside) : make("th", { scope: "row" }, ...inside);
  }));
  return [make("table", {}, make("caption", { class: "hush" }, name), head, make("tbody", {}, ...rows.map(line)))];
}
function reachable() { // what scrolls must be reached with the keyboard, and what does not is no stop on the way
  for (const region of document.querySelectorAll(".rows")) {
    const scrolls = region.scrollHeight > region.clientHeight || region.scrollWidth > region.clientWidth;
    for (const [k, v] of Object.entries({ tabindex: "0", role: "region", "aria-label": region.dataset.name })) scrolls ? region.setAttribute(k, v) : region.removeAttribute(k);
  }
}
const figure = (value, unit, label, kind = "") => make("li", { class: kind }, make("b", {}, value, unit ? make("small", {}, ` ${unit}`) : null), make("small", {}, label));
const certificate = c => {
  const name = c.file === "ca.crt" ? "authority" : "certificate";
  if (c.days_left === null) return figure("?", "", `${name}: ${c.problem}`, "fail");
  const left = c.days_left < 0 ? ["ended", ""] : [c.days_left, c.days_left === 1 ? "day" : "days"];
  return figure(...left, `${name} (${c.file}), until ${c.until.slice(0, 10)}${c.state === "ok" ? "" : ": renew it"}`, c.state === "ok" ? "" : c.state);
};
function head(f, words) {
  document.title = `Mutirão: ${f.name}`;
  $("name").textContent = f.name;
  $("state").textContent = f.works ? words[0] : f.runs ? words[1] : "does not run";
  $("state").className = `badge ${f.works ? "on" : "bad"}`;
  part("about", [f.folder, f.runs && f.since], ([folder, since]) => [folder, ...(since ? [", since ", when(since)] : [])]);
  part("problems", [...(f.runs && f.why ? [f.why] : []), ...f.problems], list => list.map(p => make("p", { class: "problem" }, p)));
}

// ---- the server's page ---------------------------------------------------------------------------------------
const presence = s => s.connected === null ? badge("unknown", "unknown") : !s.admitted ? badge("not admitted", "bad") : s.connected ? badge("connected", "on") : badge("not connected", "off");
const versions = v => Object.keys(v).length ? Object.entries(v).map(([k, x]) => `${k} ${x}`).join(", ") : make("span", { class: "soft" }, "unknown");
function server(f) {
  head(f, ["answers", "does not answer"]);
  const there = f.sites.filter(s => s.connected).length;
  const refused = f.refused.reduce((sum, r) => sum + r.times, 0);
  part("figures", [there, f.sites.length, f.certificates, refused], () => [
    figure(there, `of ${f.sites.length}`, "sites connected", there < f.sites.length ? "warn" : ""),
    ...f.certificates.map(certificate), figure(refused, "", "refused requests")]);
  part("sites", f.sites, sites => table("sites", "Sites", ["site", "state", "since", "versions", "last round answered", "dismiss"], sites.map(s => [
    [s.name, s.client !== s.name ? make("small", {}, `${s.client} in recipes`) : null, make("small", {}, s.key)],
    presence(s), when(s.since), versions(s.versions),
    s.last_round ? [`${s.last_round.round} of ${s.last_round.run} `, make("small", {}, when(s.last_round.time))] : make("span", { class: "soft" }, "none"),
    make("button", { type: "button", "data-key": s.name, "aria-label": `dismiss ${s.name}`, onclick: () => askDismiss(s.name) }, "dismiss"),
  ]), "No site is admitted yet."));
  part("runs", f.run_folders, runs => table("runs", "Runs", ["run", "recipe", "state", "round", "changed"], runs.map(r => [
    r.name, r.recipe, [badge(r.state, r.state), r.why ? make("small", {}, r.why) : null], `${r.rounds} of ${r.of}`, when(r.changed)]), "No run was made yet."));
  part("refused", f.refused, list => table("refused", "Refused requests", ["site", "rule", "why", "run", "when"], list.map(r => [
    r.site, make("code", {}, r.rule), [r.reason, make("small", {}, `refused by the ${r.by}${r.times > 1 ? `, ${r.times} times` : ""}`)],
    r.run ? `${r.run}, round ${r.round}` : "", r.time ? when(r.time) : make("span", { class: "soft" }, "since the start")]), "Nothing was refused."));
  part("trail", f.trail, list => table("trail", "What was done here", ["what", "whom", "details", "when"], list.map(e => [
    e.event, e.site || e.recipe || "", e.key || e.out || "", when(e.time)]), "Nobody was admitted or dismissed yet."));
}
function open(dialog, act) {
  const fault = dialog.querySelector(".problem"), yes = dialog.querySelector(".yes");
  fault.textContent = "";
  yes.onclick = async () => {
    yes.disabled = true;
    try { say(await act()); dialog.close(); } catch (error) { fault.textContent = error.message; } finally { yes.disabled = false; }
    look();
  };
  dialog.showModal();
}
function askDismiss(name) {
  $("whom").textContent = name; $("typed").value = "";
  open($("dismissing"), async () => { await call("/api/dismiss", { name, typed: $("typed").value }); return `dismissed: ${name}`; });
  $("typed").focus();
}
function prepareServer() {
  $("typed").addEventListener("keydown", e => { if (e.key === "Enter") { e.preventDefault(); $("dismissing").querySelector(".yes").click(); } });
  $("file").addEventListener("change", async () => {
    const file = $("file").files[0];
    if (!file) return;
    if (file.size > 4096) { $("fault").textContent = `${file.name} is too long for a public key, which is one line`; return; }
    $("fault").textContent = ""; $("key").value = (await file.text()).trim();
    $("site").value = $("site").value || file.name.replace(/\.pub$/, "");
  });
  $("admit").addEventListener("submit", async event => {
    event.preventDefault();
    const asked = { key: $("key").value, name: $("site").value, client: $("client").value };
    $("fault").textContent = "";
    try {
      const found = await call("/api/key", asked);
      $("shown").replaceChildren(...[["site", found.name], ["client in recipes", found.client], ["fingerprint", found.fingerprint]].flatMap(([k, v]) => [make("dt", {}, k), make("dd", {}, v)]));
      open($("admitting"), async () => { await call("/api/admit", { ...asked, name: found.name, client: found.client, fingerprint: found.fingerprint }); $("admit").reset(); return `admitted: ${found.name}`; });
    } catch (error) { $("fault").textContent = error.message; }
  });
}

// ---- the site's page -----------------------------------------------------------------------------------------
const rule = r => r.answer === "refused" ? [badge("refused", "off"), " ", make("code", {}, r.rule), make("small", {}, r.reason + (r.detail ? ` (${r.detail})` : ""))]
  : r.answer === "raised" ? [badge("failed", "bad"), make("small", {}, r.reason)]
  : r.answer === "sent" ? [badge("sent", "on"), ` ${size(r.bytes_out)}`] : [badge("no answer yet", "unknown")];
const left = r => r.answer !== "sent" ? make("span", { class: "soft" }, "nothing")
  : [`${r.arrays.length} arrays, ${r.n} ${r.n === 1 ? "sample" : "samples"} told`, make("small", {}, [r.metrics.length && `metrics: ${few(r.metrics)}`, r.extras.length && `extras: ${few(r.extras)}`, r.epsilon !== null && `epsilon ${short(r.epsilon)} so far`].filter(Boolean).join("; "))];
function site(f) {
  head(f, ["connected", "not connected"]);
  if (f.totals === undefined) return;
  const on = Boolean(f.paused);
  $("pause").disabled = false; $("pause").setAttribute("aria-checked", on); $("pause").textContent = on ? "on" : "off";
  part("pause-text", f.paused, since => since ? ["Every request is refused since ", when(since), "."] : ["The site answers what its policy allows. Paused, it refuses every request."]);
  part("figures", [f.totals, f.certificates], () => [figure(f.totals.asked, "", "requests"), figure(f.totals.sent, "", `replies left, ${size(f.totals.bytes_out)}`),
    figure(f.totals.refused, "", "refused"), figure(f.totals.raised, "", "failed", f.totals.raised ? "warn" : ""), ...f.certificates.map(certificate)]);
  part("budget", f.budget, b => {
    if (!b) return [make("p", { class: "soft" }, "The policy sets no privacy budget.")];
    const most = b.most ?? b.run_most, scope = b.most ? "in all" : "a run, at most";
    const spent = b.most ? b.spent : Object.values(b.runs).some(v => v === null) ? null : Math.max(0, ...Object.values(b.runs));
    const text = `epsilon ${short(spent)} of ${short(most)} ${scope} (delta ${b.delta})`;
    return [make("p", { id: "budget-text" }, text), make("meter", { min: 0, max: most, low: most * .7, high: most * .9, optimum: 0, value: spent ?? most, "aria-labelledby": "budget-text" }, text)];
  });
  part("byrun", f.by_run, runs => table("byrun", "By run", ["run", "recipe", "asked", "sent", "refused", "left", "last"], runs.map(r => [
    r.run || "unknown", r.recipe, r.asked, r.sent, r.refused, size(r.bytes_out), when(r.last)]), "Nothing was asked yet."));
  part("byrule", f.by_rule, rules => table("byrule", "Refused, by rule", ["rule", "times", "why, last", "last"], rules.map(r => [
    make("code", {}, r.rule), r.times, r.reason, when(r.last)]), "Nothing was refused."));
  part("requests", f.requests, list => table("requests", "What was asked, and what left", ["when", "request", "run", "answer", "what left"], list.map(r => [
    when(r.time), r.do ? [r.do, make("small", {}, `${size(r.bytes_in)} came`)] : "not looked at", [r.recipe + (r.round ? `, round ${r.round}` : ""), make("small", {}, r.run)], rule(r), left(r)]), "Nothing was asked yet."));
}
function prepareSite() {
  $("pause").addEventListener("click", async () => {
    const on = $("pause").getAttribute("aria-checked") !== "true";
    $("pause").disabled = true;
    let problem = "";
    try { await call("/api/pause", { on }); } catch (error) { problem = error.message; }
    await look(); // the switch says it first, then the words
    say(problem || (on ? "paused: nothing is answered" : "the site answers again"), Boolean(problem));
    $("pause").focus();
  });
}

// ---- looking -------------------------------------------------------------------------------------------------
async function look() {
  clearTimeout(timer);
  const began = performance.now(), mine = ++looks;
  try {
    const facts = await call("/api/facts");
    if (mine !== looks) return; // a later look is under way, and knows more
    (page === "server" ? server : site)(facts);
    reachable();
  } catch (error) {
    if (mine !== looks) return;
    $("state").textContent = "this page is out of date"; $("state").className = "badge bad"; $("about").textContent = error.message; drawn.about = null;
  }
  if (!document.hidden) timer = setTimeout(look, Math.max(PAUSE, 3 * (performance.now() - began))); // long trails take long
}
document.addEventListener("visibilitychange", () => document.hidden ? clearTimeout(timer) : look());
theme($("theme"));
(page === "server" ? prepareServer : prepareSite)();
look();
