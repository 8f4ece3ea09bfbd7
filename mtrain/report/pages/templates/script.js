// A legend's button brings one curve of all pictures out; pressed again, it lets go of it.
const buttons = document.querySelectorAll("[data-pick]");
for (const button of buttons) button.addEventListener("click", () => {
  const picked = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.pick;
  for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset.pick === picked));
  for (const curve of document.querySelectorAll("[data-curve]"))
    curve.classList.toggle("faint", picked !== null && curve.dataset.curve !== picked);
});

// Under the pointer or a finger: the values of all curves of a picture at the nearest step.
const shown = document.createElement("div");
shown.className = "values";
shown.hidden = true;
document.body.append(shown);
const written = value => value === null ? "not finite"
  : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(3)
  : value.toLocaleString("en", {maximumSignificantDigits: 6});
for (const chart of document.querySelectorAll("[data-values]")) {
  const {left, right, low, high, curves} = JSON.parse(chart.dataset.values);
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
  rule.setAttribute("class", "pointer");
  const place = chart.previousElementSibling?.textContent.match(/by (\w+)/)?.[1] ?? "step"; // of "nats, by token"
  chart.addEventListener("pointermove", event => {
    const box = chart.getBoundingClientRect(), [, , width, height] = chart.getAttribute("viewBox").split(" ").map(Number);
    const at = low + ((event.clientX - box.left) / box.width * width - left) / (right - left) * (high - low);
    const all = curves.flatMap(each => each.steps);
    if (!all.length) return;
    const step = all.reduce((best, each) => Math.abs(each - at) < Math.abs(best - at) ? each : best);
    const lines = curves.filter(each => each.steps.includes(step))
      .map(each => `${each.label}: ${written(each.values[each.steps.indexOf(step)])}`);
    shown.textContent = [`${place} ${step.toLocaleString("en")}`, ...lines].join("\n");
    shown.hidden = false;
    shown.style.left = `${Math.max(0, Math.min(event.clientX + 12, innerWidth - shown.offsetWidth - 4))}px`;
    shown.style.top = `${Math.max(0, event.clientY - shown.offsetHeight - 12)}px`;
    const x = left + (step - low) / (high - low) * (right - left);
    for (const [name, value] of Object.entries({x1: x, x2: x, y1: 0, y2: height})) rule.setAttribute(name, value);
    chart.append(rule);
  });
  chart.addEventListener("pointerleave", () => { shown.hidden = true; rule.remove(); });
}
