"use strict";
/* In what chosen runs differ: a row a setting, a column a run; and which of them are the same but for the seed. */
import { make, tableOf } from "./kit.js";

const BUT = new Set(["seed"]);
export const keysThatDiffer = tables => [...new Set(tables.flatMap(t => Object.keys(t)))].filter(k => new Set(tables.map(t => String(t[k]))).size > 1);

/* Runs that differ in nothing but the seed are one group. */
export function groupsOf(ids, settings) {
  const groups = new Map();
  for (const id of ids) {
    const own = settings[id] || {}, mark = Object.keys(own).length ? JSON.stringify(Object.entries(own).filter(([k]) => !BUT.has(k)).sort((a, b) => a[0] < b[0] ? -1 : 1)) : id;
    groups.set(mark, [...(groups.get(mark) || []), id]);
  }
  return [...groups.values()];
}
export function nameOf(group, names, settings, keys) { // what tells a group from the others
  if (group.length === 1) return names.get(group[0]) || group[0];
  const own = settings[group[0]] || {}, known = keys.filter(k => !BUT.has(k) && own[k] !== undefined);
  const told = known.filter(k => !k.includes(".") || !keys.includes(k.split(".")[0])); // another part has other settings: its name says enough
  return `${(told.length ? told : known).map(k => `${k} ${own[k]}`).join(", ") || names.get(group[0])} (${group.length} seeds)`;
}
export function differenceTable(columns, settings) { // columns: [name, ids]
  const tables = columns.map(([, ids]) => joined(ids.map(id => settings[id] || {}))), keys = keysThatDiffer(tables);
  if (!keys.length) return make("p", { class: "soft" }, "They differ in no setting.");
  const rows = keys.map(k => [k, ...tables.map(t => t[k] === undefined ? ["–", "soft"] : String(t[k]))]);
  return tableOf("Settings that differ", ["setting", ...columns.map(([name], i) => make("span", { class: `head h${i % 7}` }, name))], rows, { id: "difference", class: "fixed" });
}
function joined(tables) { // the settings of a group: its seeds side by side
  const out = { ...tables[0] };
  if (tables.length > 1) for (const k of keysThatDiffer(tables)) out[k] = tables.map(t => t[k]).join(", ");
  return out;
}
