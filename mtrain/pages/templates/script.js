// A legend's button brings one curve of all pictures out; pressed again, it lets go of it.
const buttons = document.querySelectorAll("[data-pick]");
for (const button of buttons) button.addEventListener("click", () => {
  const picked = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.pick;
  for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset.pick === picked));
  for (const curve of document.querySelectorAll("[data-curve]"))
    curve.classList.toggle("faint", picked !== null && curve.dataset.curve !== picked);
});
