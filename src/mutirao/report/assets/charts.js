"use strict";
/* Charts as SVG, drawn from plain tables of numbers. No library, no network.
   Charts.draw(figure, spec) fills a <figure>; it returns {update(spec)}. Every chart can be read with the keyboard,
   shown as a table, and saved as CSV or SVG. Text from a run folder is only ever set as text, never as markup. */
const Charts = (() => {
  const NS = (() => { const t = document.createElement("template"); t.innerHTML = "<svg></svg>"; return t.content.firstChild.namespaceURI; })();
  const TINTS = 7, DASHES = ["", "6 3", "2 3", "8 3 2 3"], SHADES = 6;
  let count = 0;

  const el = (name, attrs = {}, text) => fill(document.createElement(name), attrs, text);
  const svg = (name, attrs = {}, text) => fill(document.createElementNS(NS, name), attrs, text);
  function fill(node, attrs, text) {
    for (const [k, v] of Object.entries(attrs)) if (v !== null && v !== undefined) node.setAttribute(k, v);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  // ---- numbers -------------------------------------------------------------------------------------------------
  const real = v => typeof v === "number" && Number.isFinite(v);
  function short(v, unit) {
    if (!real(v)) return "–";
    if (unit === "bytes") {
      const names = ["B", "kB", "MB", "GB", "TB"]; let i = 0;
      while (Math.abs(v) >= 1000 && i < 4) { v /= 1000; i++; }
      return `${Number(v.toPrecision(3))} ${names[i]}`;
    }
    const size = Math.abs(v);
    if (size && (size < 1e-4 || size >= 1e7)) return v.toExponential(2);
    return String(Number(v.toPrecision(size >= 1000 ? 6 : 4)));
  }
  function range(values, zero) {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (real(v)) { if (v < low) low = v; if (v > high) high = v; }
    if (low > high) return [0, 1];
    if (zero) { low = Math.min(0, low); high = Math.max(0, high); }
    if (low === high) { const by = Math.abs(low) * 0.1 || 0.5; if (!(zero && low === 0)) low -= by; high += by; if (zero) low = Math.min(0, Math.max(0, low)); }
    return [low, high];
  }
  function ticks(low, high, about, whole) {
    const rough = (high - low) / Math.max(1, about), power = 10 ** Math.floor(Math.log10(rough || 1));
    let step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough) || power;
    if (whole) step = Math.max(1, Math.round(step));
    const out = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
    return out;
  }
  const scale = (d0, d1, p0, p1) => v => p0 + (v - d0) / ((d1 - d0) || 1) * (p1 - p0);

  // ---- tables: what is downloaded, read aloud and shown below a chart ------------------------------------------
  function table(spec) {
    if (spec.kind === "lines") {
      const xs = [...new Set(spec.series.flatMap(s => s.x))].sort((a, b) => a - b), at = new Map(xs.map((x, i) => [x, i]));
      const head = [spec.x.label], cols = [];
      for (const s of spec.series) {
        const parts = s.lo ? [["", s.y], [" low", s.lo], [" high", s.hi]] : [["", s.y]];
        for (const [suffix, values] of parts) {
          const col = new Array(xs.length).fill("");
          s.x.forEach((x, i) => { if (values[i] !== null) col[at.get(x)] = values[i]; });
          head.push(s.name + suffix); cols.push(col);
        }
      }
      return [head, ...xs.map((x, i) => [x, ...cols.map(c => c[i])])];
    }
    if (spec.kind === "bars") return [[spec.x.label, ...spec.series.map(s => s.name)], ...spec.categories.map((c, i) => [c, ...spec.series.map(s => s.values[i])])];
    if (spec.kind === "heat") return [[spec.y.label, ...spec.cols], ...spec.rows.map((r, i) => [r, ...spec.values[i].map(v => v === null ? "" : v)])];
    if (spec.kind === "dots") return [["", "name", spec.y.label], ...spec.categories.flatMap((c, i) => spec.points[i].map((p, j) => [c, (spec.names && spec.names[i][j]) || j + 1, p]))];
    const named = spec.series.some(s => s.labels);
    const head = ["series", ...(named ? ["name"] : []), spec.x.label, spec.y.label, ...(spec.shade ? [spec.shade.label] : [])];
    return [head, ...spec.series.flatMap(s => s.x.map((x, i) => [s.name, ...(named ? [(s.labels || [])[i] || ""] : []), x, s.y[i], ...(spec.shade ? [s.shade[i]] : [])]))];
  }
  function csv(rows) {
    const cell = v => {
      if (typeof v === "number") return String(v);
      let t = String(v ?? "");
      if (/^[=+@\t\r-]/.test(t)) t = "'" + t; // a spreadsheet must not take a client's name for a formula
      return /[",\n\r]/.test(t) ? `"${t.replaceAll('"', '""')}"` : t;
    };
    return rows.map(r => r.map(cell).join(",")).join("\n") + "\n";
  }
  function save(name, text, type) {
    const url = URL.createObjectURL(new Blob([text], { type })), a = el("a", { href: url, download: name });
    document.body.append(a); a.click(); a.remove();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }
  function saveSvg(name, drawing) {
    // A copy in light colours, with every style written out, so that any program can show it.
    const host = el("div", { "data-theme": "light", class: "chart offstage" }), copy = drawing.cloneNode(true);
    copy.querySelectorAll(".cursor, .brush").forEach(n => n.remove());
    host.append(copy); document.body.append(host);
    for (const node of copy.querySelectorAll("*")) {
      const style = getComputedStyle(node);
      for (const p of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "fill-opacity", "font-size", "font-family", "text-anchor"]) {
        const v = style.getPropertyValue(p);
        if (v && v !== "none" || p === "fill" || p === "stroke") node.setAttribute(p, v);
      }
      node.removeAttribute("class");
    }
    host.remove();
    save(name, new XMLSerializer().serializeToString(copy), "image/svg+xml");
  }

  // ---- one chart -----------------------------------------------------------------------------------------------
  function draw(figure, spec) {
    const id = `chart${++count}`;
    let zoom = null, hidden = new Set(), stops = [], at = -1, frame = null, wide = 0;
    if (!figure.querySelector("figcaption")) figure.append(el("figcaption", {}, spec.title));
    const plot = el("div", { class: "plot", tabindex: 0, role: "group", "aria-roledescription": "chart", "aria-describedby": `${id}k` });
    const tip = el("div", { class: "tip", hidden: "" }), said = el("div", { class: "hush", "aria-live": "polite" });
    const legend = el("div", { class: "legend" }), keys = el("p", { class: "hush", id: `${id}k` }, "Arrow keys read the values, plus and minus zoom, 0 shows all.");
    const tools = el("div", { class: "tools" }), details = el("details"), summary = el("summary", {}, "Table");
    const button = (text, what, does) => { const b = el("button", { type: "button", "aria-label": `${text}: ${spec.title}` }, what); b.addEventListener("click", does); tools.append(b); return b; };
    const file = () => (spec.title || "chart").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "chart";
    const reset = button("Show all", "show all", () => { zoom = null; paint(); });
    button("Download data", "download data", () => save(`${file()}.csv`, csv(table(spec)), "text/csv"));
    button("Download SVG", "download SVG", () => { const d = plot.querySelector("svg"); if (d) saveSvg(`${file()}.svg`, d); });
    details.append(summary);
    details.addEventListener("toggle", () => { if (details.open) fillTable(); });
    plot.append(tip); tools.append(details);
    figure.append(plot, legend, keys, said, tools);

    function fillTable() {
      details.querySelector(".scroll")?.remove();
      const rows = table(spec), box = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${spec.title}` }), t = el("table");
      t.append(el("caption", { class: "hush" }, spec.title));
      rows.slice(0, 501).forEach((r, i) => {
        const tr = el("tr");
        r.forEach((v, j) => tr.append(el(i ? "td" : "th", { class: j && typeof v === "number" ? "number" : null, scope: i ? null : "col" }, typeof v === "number" ? short(v) : String(v ?? ""))));
        t.append(tr);
      });
      box.append(t);
      if (rows.length > 501) box.append(el("p", {}, `and ${rows.length - 501} more rows in the data`));
      details.append(box);
    }

    function paint() {
      const width = Math.max(240, Math.floor(plot.clientWidth || figure.clientWidth || 600));
      wide = width;
      const height = spec.height || (spec.kind === "heat" ? Math.min(460, 90 + spec.rows.length * 6) : spec.lying ? 60 + spec.categories.length * Math.max(4, Math.min(22, 420 / spec.categories.length)) : 250);
      const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-labelledby": `${id}t ${id}d` });
      drawing.append(svg("title", { id: `${id}t` }, spec.title), svg("desc", { id: `${id}d` }, spec.about || ""));
      stops = [];
      frame = KINDS[spec.kind]({ spec, drawing, width, height, zoom, hidden, stops });
      plot.querySelector("svg")?.remove();
      plot.prepend(drawing);
      plot.setAttribute("aria-label", spec.title);
      reset.hidden = !zoom;
      at = Math.min(at, stops.length - 1);
      names();
      if (details.open) fillTable();
    }
    function names() {
      const list = spec.kind === "heat" || spec.shade || spec.kind === "dots" ? [] : spec.series;
      legend.replaceChildren();
      if (spec.shade || spec.kind === "heat") { if (spec.shade || spec.most > 1) scaleKey(legend, spec); return; }
      const many = list.filter(s => !s.faint).length;
      if (many < 2 || many > 24) return;
      list.forEach((s, i) => {
        if (s.faint) return;
        const b = el("button", { type: "button", "aria-pressed": String(!hidden.has(s.name)) });
        const key = svg("svg", { width: 22, height: 10, "aria-hidden": "true" });
        key.append(spec.kind === "lines" ? svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, class: `line t${tint(s, i)}`, "stroke-dasharray": dash(s, i) }) : spec.kind === "scatter" ? marker(i, 11, 5, 4, `mark t${tint(s, i)}`) : svg("rect", { x: 4, width: 14, height: 10, class: `bar ${barTint(spec, i)}` }));
        b.append(key, s.name);
        b.addEventListener("click", () => { hidden.has(s.name) ? hidden.delete(s.name) : hidden.add(s.name); paint(); });
        legend.append(b);
      });
    }
    function show(i, aloud) {
      drawCursor(null);
      if (i < 0 || i >= stops.length) { tip.hidden = true; return; }
      const stop = stops[i];
      at = i;
      tip.replaceChildren(...stop.text.map((t, j) => el(j ? "div" : "b", {}, t)));
      tip.hidden = false;
      const right = stop.px > wide / 2;
      tip.style.left = right ? "" : `${stop.px + 12}px`; tip.style.right = right ? `${wide - stop.px + 12}px` : "";
      tip.style.top = `${Math.max(0, Math.min((stop.py ?? 20) - 10, 160))}px`;
      drawCursor(stop);
      if (aloud) said.textContent = stop.text.join(", ");
    }
    function drawCursor(stop) {
      const drawing = plot.querySelector("svg");
      drawing?.querySelectorAll(".cursor").forEach(n => n.remove());
      if (!stop || !drawing) return;
      if (stop.box) drawing.append(svg("rect", { class: "cursor", x: stop.box[0], y: stop.box[1], width: stop.box[2], height: stop.box[3] }));
      else if (frame.free) drawing.append(svg("circle", { class: "cursor", cx: stop.px, cy: stop.py, r: 6 }));
      else drawing.append(svg("line", { class: "cursor", x1: stop.px, x2: stop.px, y1: frame.top, y2: frame.bottom }));
    }
    function nearest(px, py) {
      let best = -1, near = Infinity;
      stops.forEach((s, i) => {
        const dx = s.px - px, dy = frame.free || s.box ? (s.py - py) : 0;
        const d = dx * dx + dy * dy;
        if (d < near) { near = d; best = i; }
      });
      return best;
    }
    const place = e => { const r = plot.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
    let from = null;
    plot.addEventListener("pointermove", e => {
      const [px, py] = place(e);
      if (from !== null) {
        const drawing = plot.querySelector("svg");
        drawing.querySelectorAll(".brush").forEach(n => n.remove());
        drawing.append(svg("rect", { class: "brush", x: Math.min(from, px), y: frame.top, width: Math.abs(px - from), height: frame.bottom - frame.top }));
      } else show(nearest(px, py), false);
    });
    plot.addEventListener("pointerleave", () => { if (from === null) show(-1); });
    plot.addEventListener("pointerdown", e => {
      if (!frame.invert || e.button || e.pointerType === "touch") return; // a finger scrolls the page
      from = place(e)[0]; plot.setPointerCapture(e.pointerId); show(-1);
    });
    plot.addEventListener("pointerup", e => {
      if (from === null) return;
      const a = frame.invert(Math.min(from, place(e)[0])), b = frame.invert(Math.max(from, place(e)[0])), far = Math.abs(place(e)[0] - from) > 8;
      from = null;
      plot.querySelectorAll(".brush").forEach(n => n.remove());
      if (far) { zoom = [a, b]; paint(); }
    });
    plot.addEventListener("dblclick", () => { zoom = null; paint(); });
    plot.addEventListener("keydown", e => {
      const row = frame.across || 1, step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row }[e.key];
      if (step) show(Math.max(0, Math.min(stops.length - 1, at < 0 ? (step > 0 ? 0 : stops.length - 1) : at + step)), true);
      else if (e.key === "Home") show(0, true);
      else if (e.key === "End") show(stops.length - 1, true);
      else if ((e.key === "+" || e.key === "=" || e.key === "-") && frame.invert) {
        const [a, b] = frame.domain, middle = stops[at]?.x ?? (a + b) / 2, by = (b - a) * (e.key === "-" ? 1 : 0.25);
        zoom = [Math.max(frame.whole[0], middle - by), Math.min(frame.whole[1], middle + by)];
        if (zoom[0] <= frame.whole[0] && zoom[1] >= frame.whole[1]) zoom = null;
        paint(); show(at < 0 ? -1 : at, false);
      } else if (e.key === "0" || e.key === "Escape") { zoom = null; at = -1; paint(); show(-1); }
      else return;
      e.preventDefault();
    });
    plot.addEventListener("blur", () => show(-1));
    new ResizeObserver(() => { if (Math.abs((plot.clientWidth || 0) - wide) > 2) paint(); }).observe(plot);
    paint();
    return { update(next) { spec = next; paint(); }, spec: () => spec };
  }

  // ---- kinds ---------------------------------------------------------------------------------------------------
  const tint = (s, i) => (s.tint ?? i) % TINTS;
  const dash = (s, i) => s.dash ?? DASHES[Math.floor((s.tint ?? i) / TINTS) % DASHES.length];
  const barTint = (spec, k) => spec.series.length > TINTS ? `m${k % 10}` : `t${tint(spec.series[k], k)}`;
  const shownIn = (c, s) => !c.hidden.has(s.of ?? s.name); // what is faint goes with the curve it is of
  const visible = c => c.spec.series.filter(s => shownIn(c, s));
  const place = c => c.spec.series.map((s, i) => [s, i]).filter(([s]) => shownIn(c, s));

  function axes(c, xs, ys, x0, x1, y0, y1) {
    const { spec, drawing, width, height } = c, unit = spec.y.unit;
    const marks = ticks(y0, y1, 5, spec.y.whole), texts = marks.map(v => short(v, unit));
    const left = 14 + 7 * Math.max(...texts.map(t => t.length), 1) + (spec.y.label ? 14 : 0), box = { left, right: width - 12, top: 12, bottom: height - 40 };
    const X = scale(x0, x1, box.left, box.right), Y = scale(y0, y1, box.bottom, box.top);
    marks.forEach((v, i) => {
      drawing.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(v), y2: Y(v) }), svg("text", { class: "tick", x: box.left - 6, y: Y(v) + 4, "text-anchor": "end" }, texts[i]));
    });
    if (spec.y.label) drawing.append(svg("text", { class: "name", transform: `translate(12 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, spec.y.label));
    if (!spec.categories) for (const v of ticks(x0, x1, width < 420 ? 4 : 8, spec.x.whole)) drawing.append(svg("text", { class: "tick", x: X(v), y: box.bottom + 16, "text-anchor": "middle" }, short(v, spec.x.unit)));
    drawing.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    if (spec.x.label) drawing.append(svg("text", { class: "name", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, spec.x.label));
    return { ...box, X, Y };
  }
  const within = (x, zoom) => !zoom || (x >= zoom[0] && x <= zoom[1]);
  function zoomable(c, box, domain, whole, more) {
    return { ...box, domain, whole, invert: px => domain[0] + (px - box.left) / (box.right - box.left) * (domain[1] - domain[0]), ...more };
  }

  const MOST_STOPS = 6000; // places that can be read; of more, those that are drawn
  function thin(keep, X, s) { // more points than pixels: of each pixel the first, the last, the lowest and the highest
    if (keep.length < 4000) return keep;
    const out = [];
    for (let a = 0, b; a < keep.length; a = b) {
      const px = Math.floor(X(s.x[keep[a]]));
      let low = a, high = a;
      for (b = a; b < keep.length && Math.floor(X(s.x[keep[b]])) === px; b++) {
        if ((s.lo ?? s.y)[keep[b]] < (s.lo ?? s.y)[keep[low]]) low = b;
        if ((s.hi ?? s.y)[keep[b]] > (s.hi ?? s.y)[keep[high]]) high = b;
      }
      out.push(...[...new Set([a, low, high, b - 1])].sort((x, y) => x - y).map(k => keep[k]));
    }
    return out;
  }
  function lines(c) {
    const { spec, drawing, zoom, stops } = c, shown = visible(c);
    const whole = range(spec.series.flatMap(s => s.x)), [x0, x1] = zoom || whole;
    const ys = [];
    for (const s of shown) s.x.forEach((x, i) => { if (within(x, zoom)) { ys.push(s.y[i]); if (s.lo) ys.push(s.lo[i], s.hi[i]); } });
    let [y0, y1] = range(ys, spec.y.zero);
    if (!spec.y.zero) { const pad = (y1 - y0) * 0.05; y0 -= pad; y1 += pad; }
    if (spec.y.top !== undefined) y1 = Math.max(y1, spec.y.top);
    const box = axes(c, null, null, x0, x1, y0, y1), { X, Y } = box;
    const by = new Map(), crowded = new Set(spec.series.flatMap(s => s.x)).size > MOST_STOPS;
    for (const [s, i] of place(c)) {
      const all = s.x.map((x, j) => j).filter(j => within(s.x[j], zoom) && real(s.y[j])), keep = thin(all, X, s);
      const k = tint(s, i);
      if (s.lo && keep.length > 1) {
        const top = keep.map(j => `${X(s.x[j]).toFixed(1)},${Y(s.hi[j] ?? s.y[j]).toFixed(1)}`), low = keep.map(j => `${X(s.x[j]).toFixed(1)},${Y(s.lo[j] ?? s.y[j]).toFixed(1)}`).reverse();
        drawing.append(svg("polygon", { class: `band t${k}`, points: [...top, ...low].join(" ") }));
      }
      drawing.append(svg("polyline", { class: `line t${k}${s.faint ? " faint" : ""}`, "stroke-dasharray": dash(s, i), points: keep.map(j => `${X(s.x[j]).toFixed(1)},${Y(s.y[j]).toFixed(1)}`).join(" ") }));
      if (keep.length <= 40 && !s.plain && !s.faint) for (const j of keep) drawing.append(svg("circle", { class: `mark t${k}`, cx: X(s.x[j]), cy: Y(s.y[j]), r: keep.length === 1 ? 4 : 2.2 }));
      for (const j of s.faint ? [] : crowded ? keep : all) {
        if (!by.has(s.x[j])) by.set(s.x[j], []);
        by.get(s.x[j]).push([s, j]);
      }
    }
    for (const x of [...by.keys()].sort((a, b) => a - b)) {
      const found = by.get(x);
      const say = ([s, j]) => `${s.name}: ${short(s.y[j], spec.y.unit)}${s.lo && real(s.lo[j]) ? ` (${short(s.lo[j])} to ${short(s.hi[j])})` : ""}`;
      stops.push({ x, px: X(x), py: 20, get text() { return [`${spec.x.label} ${short(x, spec.x.unit)}`, ...found.slice(0, 12).map(say)]; } }); // made when it is read
    }
    if (!by.size) drawing.append(svg("text", { class: "tick", x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2, "text-anchor": "middle" }, "nothing to show"));
    return zoomable(c, box, [x0, x1], whole, {});
  }

  function bars(c) {
    const { spec, drawing, stops, width, height } = c, shown = visible(c), n = spec.categories.length;
    const totals = spec.categories.map((_, i) => shown.reduce((a, s) => a + (s.values[i] || 0), 0));
    const say = i => [`${spec.x.label} ${spec.categories[i]}`, ...shown.filter(s => shown.length < 2 || s.values[i]).slice(0, 14).map(s => `${s.name}: ${short(s.values[i], spec.y.unit)}`), ...(shown.length > 1 ? [`together: ${short(totals[i], spec.y.unit)}`] : [])];
    const [, most] = range(totals, true);
    if (spec.lying) { // one horizontal bar a category
      const label = Math.min(130, 18 + 7 * Math.max(...spec.categories.map(t => String(t).length), 1)), box = { left: label, right: width - 12, top: 6, bottom: height - 40 };
      const X = scale(0, most, box.left, box.right), step = (box.bottom - box.top) / n, gap = step > 8 ? 2 : 0, every = Math.ceil(n * 13 / (box.bottom - box.top));
      for (const v of ticks(0, most, width < 420 ? 3 : 6)) drawing.append(svg("line", { class: "grid", x1: X(v), x2: X(v), y1: box.top, y2: box.bottom }), svg("text", { class: "tick", x: X(v), y: box.bottom + 16, "text-anchor": "middle" }, short(v, spec.y.unit)));
      drawing.append(svg("text", { class: "name", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, spec.y.label));
      const paths = spec.series.map(() => "");
      spec.categories.forEach((name, i) => {
        let sum = 0; const y = box.top + i * step + gap / 2;
        for (const [s, k] of place(c)) { const v = s.values[i] || 0; if (v) paths[k] += `M${X(sum).toFixed(1)} ${y.toFixed(1)}H${X(sum + v).toFixed(1)}V${(y + step - gap).toFixed(1)}H${X(sum).toFixed(1)}Z`; sum += v; }
        if (i % every === 0) drawing.append(svg("text", { class: "tick", x: box.left - 6, y: y + step / 2 + 4, "text-anchor": "end" }, String(name).slice(0, 18)));
        stops.push({ px: X(sum / 2), py: y + step / 2, text: say(i), box: [box.left, y, X(sum) - box.left, Math.max(1, step - gap)] });
      });
      paths.forEach((d, k) => { if (d) drawing.append(svg("path", { class: `bar ${barTint(spec, k)}`, d })); });
      return { ...box };
    }
    const box = axes(c, null, null, -0.5, n - 0.5, 0, most * 1.05), { X, Y } = box, step = (box.right - box.left) / Math.max(1, n), gap = step > 6 ? 2 : 0;
    const paths = spec.series.map(() => "");
    const room = Math.max(...spec.categories.map(t => String(t).length), 1) * 7 + 8, every = Math.max(1, Math.ceil(n * room / (box.right - box.left)));
    spec.categories.forEach((name, i) => {
      let sum = 0; const x = X(i) - step / 2 + gap / 2;
      for (const [s, k] of place(c)) { const v = s.values[i] || 0; if (v) paths[k] += `M${x.toFixed(1)} ${Y(sum).toFixed(1)}V${Y(sum + v).toFixed(1)}H${(x + step - gap).toFixed(1)}V${Y(sum).toFixed(1)}Z`; sum += v; }
      if (i % every === 0) drawing.append(svg("text", { class: "tick", x: X(i), y: box.bottom + 16, "text-anchor": "middle" }, String(name)));
      stops.push({ px: X(i), py: Y(sum), text: say(i), box: [x, Y(sum), Math.max(1, step - gap), box.bottom - Y(sum)] });
    });
    paths.forEach((d, k) => { if (d) drawing.append(svg("path", { class: `bar ${barTint(spec, k)}`, d })); });
    return { ...box };
  }

  const shadeOf = (v, low, high) => Math.max(0, Math.min(SHADES - 1, Math.floor((v - low) / ((high - low) || 1) * SHADES * 0.9999)));
  function heat(c) {
    const { spec, drawing, stops, width, height } = c, rows = spec.rows.length, cols = spec.cols.length;
    const label = Math.min(110, 30 + 7 * Math.max(...spec.rows.map(t => String(t).length), 1)), box = { left: label, right: width - 12, top: 6, bottom: height - 40 };
    const w = (box.right - box.left) / cols, h = (box.bottom - box.top) / rows, paths = new Array(SHADES).fill("");
    spec.values.forEach((row, i) => row.forEach((v, j) => {
      const x = box.left + j * w, y = box.top + i * h;
      if (v !== null && v !== 0) paths[shadeOf(v, 0, spec.most)] += `M${x.toFixed(1)} ${y.toFixed(1)}h${w.toFixed(2)}v${h.toFixed(2)}h${(-w).toFixed(2)}z`;
      stops.push({ px: x + w / 2, py: y + h / 2, box: [x, y, w, h], text: [`${spec.y.label} ${spec.rows[i]}`, `${spec.x.label} ${spec.cols[j]}: ${v === null ? "not selected" : `${short(v)} ${spec.unit || ""}`}`] });
    }));
    drawing.append(svg("rect", { class: "empty", x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top }));
    paths.forEach((d, k) => { if (d) drawing.append(svg("path", { class: `shade s${k}`, d })); });
    const every = Math.max(1, Math.ceil(rows * 13 / (box.bottom - box.top))), over = Math.max(1, Math.ceil(cols * 40 / (box.right - box.left)));
    spec.rows.forEach((r, i) => { if (i % every === 0) drawing.append(svg("text", { class: "tick", x: box.left - 6, y: box.top + (i + 0.5) * h + 4, "text-anchor": "end" }, String(r).slice(0, 14))); });
    spec.cols.forEach((t, j) => { if (j % over === 0) drawing.append(svg("text", { class: "tick", x: box.left + (j + 0.5) * w, y: box.bottom + 16, "text-anchor": "middle" }, String(t))); });
    drawing.append(svg("text", { class: "name", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, spec.x.label), svg("text", { class: "name", transform: `translate(12 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, spec.y.label));
    return { ...box, free: true, across: cols };
  }

  function marker(i, x, y, r, cls) {
    const k = i % 4, p = { class: cls };
    if (k === 1) return svg("rect", { ...p, x: x - r, y: y - r, width: 2 * r, height: 2 * r });
    if (k === 2) return svg("path", { ...p, d: `M${x} ${y - r * 1.2}L${x + r * 1.2} ${y + r}H${x - r * 1.2}Z` });
    if (k === 3) return svg("path", { ...p, d: `M${x} ${y - r * 1.4}L${x + r * 1.4} ${y}L${x} ${y + r * 1.4}L${x - r * 1.4} ${y}Z` });
    return svg("circle", { ...p, cx: x, cy: y, r });
  }
  function scatter(c) {
    const { spec, drawing, zoom, stops } = c, whole = range(spec.series.flatMap(s => s.x)), pad = (whole[1] - whole[0]) * 0.03;
    whole[0] -= pad; whole[1] += pad;
    const [x0, x1] = zoom || whole, ys = visible(c).flatMap(s => s.y.filter((_, i) => within(s.x[i], zoom)));
    let [y0, y1] = range(ys, spec.y.zero);
    const lift = (y1 - y0) * 0.05; y1 += lift; if (!spec.y.zero) y0 -= lift;
    const box = axes(c, null, null, x0, x1, y0, y1), { X, Y } = box;
    for (const [s, i] of place(c)) s.x.forEach((x, j) => {
      if (!within(x, zoom) || !real(s.y[j])) return;
      const cls = spec.shade ? `mark d${shadeOf(s.shade[j], -spec.shade.most, spec.shade.most)}` : `mark t${tint(s, i)}`;
      drawing.append(marker(spec.shade ? 0 : i, X(x), Y(s.y[j]), spec.big ? 5 : 2.6, cls));
      stops.push({ x, px: X(x), py: Y(s.y[j]), text: [s.labels ? String(s.labels[j]) : s.name, `${spec.x.label}: ${short(x)}`, `${spec.y.label}: ${short(s.y[j])}`, ...(spec.shade ? [`${spec.shade.label}: ${short(s.shade[j])}`] : s.labels && s.name ? [s.name] : [])] });
    });
    stops.sort((a, b) => a.px - b.px || a.py - b.py);
    return zoomable(c, box, [x0, x1], whole, { free: true });
  }
  function dots(c) { // points of each category, with the mean and its interval
    const { spec, drawing, stops, width } = c, n = spec.categories.length;
    spec.height = Math.max(70 + n * 26, Math.min(230, 70 + n * 54));
    const all = spec.points.flat().concat(spec.mean.flatMap((m, i) => real(spec.half[i]) ? [m - spec.half[i], m + spec.half[i]] : [m]));
    let [v0, v1] = range(all); const pad = (v1 - v0) * 0.05; v0 -= pad; v1 += pad;
    const height = spec.height, label = Math.min(width * 0.4, 18 + 7 * Math.max(...spec.categories.map(t => t.length))), box = { left: label, right: width - 16, top: 8, bottom: height - 42 };
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`); drawing.setAttribute("height", height);
    const X = scale(v0, v1, box.left, box.right), step = (box.bottom - box.top) / n;
    for (const v of ticks(v0, v1, width < 420 ? 3 : 6)) drawing.append(svg("line", { class: "grid", x1: X(v), x2: X(v), y1: box.top, y2: box.bottom }), svg("text", { class: "tick", x: X(v), y: box.bottom + 16, "text-anchor": "middle" }, short(v)));
    drawing.append(svg("text", { class: "name", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, spec.y.label));
    spec.categories.forEach((name, i) => {
      const y = box.top + (i + 0.5) * step, k = i % TINTS;
      drawing.append(svg("text", { class: "tick", x: box.left - 8, y: y + 4, "text-anchor": "end" }, name.slice(0, Math.floor(label / 7))));
      if (real(spec.half[i])) drawing.append(svg("line", { class: `line t${k}`, x1: X(spec.mean[i] - spec.half[i]), x2: X(spec.mean[i] + spec.half[i]), y1: y, y2: y }));
      spec.points[i].forEach((p, j) => drawing.append(svg("circle", { class: `mark faint t${k}`, cx: X(p), cy: y + ((j % 5) - 2) * 2.4, r: 3 })));
      drawing.append(svg("path", { class: `line t${k}`, d: `M${X(spec.mean[i])} ${y - 8}V${y + 8}` }));
      stops.push({ px: X(spec.mean[i]), py: y, box: [box.left, y - step / 2, box.right - box.left, step], text: [name, `mean ${short(spec.mean[i])}${real(spec.half[i]) ? ` ± ${short(spec.half[i])}` : ""}`, `${spec.points[i].length} runs`] });
    });
    return { ...box };
  }
  function scaleKey(legend, spec) {
    const [low, high] = spec.shade ? [-spec.shade.most, spec.shade.most] : [0, spec.most], box = el("span", { class: "scalekey" });
    box.append(short(low));
    const key = svg("svg", { width: SHADES * 18, height: 10, "aria-hidden": "true" });
    for (let k = 0; k < SHADES; k++) key.append(svg("rect", { x: k * 18, width: 18, height: 10, class: spec.shade ? `mark d${k}` : `shade s${k}` }));
    box.append(key, `${short(high)} ${spec.shade ? spec.shade.label : spec.unit || ""}`);
    legend.append(box);
  }
  const KINDS = { lines, bars, heat, scatter, dots };

  // ---- light and dark ------------------------------------------------------------------------------------------
  function theme(button) {
    const root = document.documentElement, keep = { get: () => { try { return localStorage.getItem("theme"); } catch { return null; } }, set: v => { try { localStorage.setItem("theme", v); } catch { /* a page from a mail has no storage */ } } };
    const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    const tell = () => { button.textContent = dark() ? "light" : "dark"; button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`); };
    if (keep.get()) root.dataset.theme = keep.get();
    button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; keep.set(root.dataset.theme); tell(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
    tell();
  }
  return { draw, theme, table, csv, save, short };
})();
