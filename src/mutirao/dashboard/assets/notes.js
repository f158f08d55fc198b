"use strict";
/* Notes kept in the run's folder. Who saves second is shown what the first wrote, and keeps what was typed. */
import { make, post } from "./kit.js";

const MOST = 20000;
export function notesBox(id, notes, readonly) {
  let seen = notes.mark, writing = false;
  const said = make("p", { role: "status", class: "soft" }), theirs = make("div", { class: "theirs" });
  const box = make("details", { class: "notes", open: Boolean(notes.text || notes.problem) }, make("summary", {}, "Notes"));
  if (notes.problem) { box.append(make("p", { class: "problem" }, notes.problem)); return box; }
  if (readonly) { box.append(make("pre", { class: "noted", tabindex: 0 }, notes.text || "nothing is noted")); return box; }
  const field = make("textarea", { id: "notes", rows: Math.min(16, Math.max(3, notes.text.split("\n").length + 1)), maxlength: MOST, "aria-label": "Notes about this run", placeholder: "What was tried, what came of it. Kept as notes.md in the run's folder." });
  field.value = notes.text;
  const save = make("button", { type: "button", id: "keep", disabled: true, onclick: write }, "save notes");
  field.addEventListener("input", () => { save.disabled = false; said.textContent = "not saved yet"; });
  async function write() {
    save.disabled = writing = true;
    const sent = field.value, answer = await post("/api/notes", { id, text: sent, seen }).catch(error => ({ ok: false, detail: error.message }));
    writing = false;
    if (answer.ok) { seen = answer.notes.mark; theirs.replaceChildren(); said.textContent = field.value === sent ? "saved" : "not saved yet"; save.disabled = field.value === sent; return; }
    save.disabled = false;
    said.textContent = answer.detail || "the notes could not be saved";
    if (answer.notes) { // somebody else was first: show theirs, keep ours, and let the next save replace theirs knowingly
      seen = answer.notes.mark;
      said.textContent = "Somebody else saved meanwhile: theirs is below, yours is still here. Put together what you need and save again.";
      theirs.replaceChildren(make("h3", {}, "What the other saved"), make("pre", { tabindex: 0 }, answer.notes.text || "(they removed the notes)"),
        make("button", { type: "button", onclick: () => { field.value = `${answer.notes.text.trimEnd()}\n\n${field.value}`; theirs.replaceChildren(); } }, "put theirs above mine"));
    }
  }
  box.append(field, make("div", { class: "acts" }, save, said), theirs);
  box.unsaved = () => writing || !save.disabled;
  return box;
}
