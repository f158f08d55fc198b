"use strict";
/* A report's own script: draw the charts of the page when they come near, and all of them before printing. */
(() => {
  const specs = JSON.parse(document.getElementById("data").textContent);
  const waiting = new Set(document.querySelectorAll("figure[data-chart]"));
  const draw = figure => { if (waiting.delete(figure)) Charts.draw(figure, specs[figure.dataset.chart]); };
  const near = new IntersectionObserver(found => found.forEach(f => { if (f.isIntersecting) draw(f.target); }), { rootMargin: "600px" });
  waiting.forEach(f => near.observe(f));
  addEventListener("beforeprint", () => [...waiting].forEach(draw));
  Charts.theme(document.getElementById("theme"));
})();
