"""The style sheet and the script of all pages."""

STYLE = """
:root{--paper:#fff;--ink:#1b1f24;--soft:#57606a;--rule:#d0d7de;--card:#f6f8fa;--good:#116329;--good-paper:#dafbe1;
--bad:#a40e26;--bad-paper:#ffebe9;--line-light:40%;--focus:#0550ae;--empty:#eaeef2;
--b0:#f0f6f4;--b1:#d9ece6;--b2:#b5dacd;--b3:#86c0ae;--b4:#53a08b;--b5:#2c7a67;--b6:#f4a259;--b7:#e0562f;--b8:#a40e26;
--cross:#000;--cross8:#fff}
@media (prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--soft:#9da7b1;--rule:#3d444d;--card:#151b23;
--good:#56d364;--good-paper:#12261e;--bad:#ff7b72;--bad-paper:#2d1417;--line-light:66%;--focus:#79c0ff;--empty:#212830;
--b0:#16231f;--b1:#1b342d;--b2:#20493e;--b3:#276454;--b4:#31836d;--b5:#47ad91;--b6:#b8651b;--b7:#e0562f;--b8:#ff5a6b;--cross8:#000}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:80rem;margin:0 auto;padding:1rem clamp(.75rem,3vw,2rem) 4rem}
h1{font-size:1.4rem;font-weight:500;line-height:1.3;margin:0 0 .4rem}
h2{font-size:1.2rem;margin:2.5rem 0 .5rem}
h3{font-size:1rem;margin:1.2rem 0 .3rem}
p{margin:.4rem 0;max-width:75ch;overflow-wrap:anywhere}
code,pre,.number,svg text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{font-size:.9em;overflow-wrap:anywhere}
pre{background:var(--card);border:1px solid var(--rule);border-radius:6px;padding:.75rem;margin:.5rem 0;
font-size:.85rem;line-height:1.45;white-space:pre-wrap;overflow-wrap:anywhere}
.verdict{border-left:.4rem solid;border-radius:6px;padding:1rem 1.25rem}
.verdict.good{border-color:var(--good);background:var(--good-paper)}
.verdict.bad{border-color:var(--bad);background:var(--bad-paper)}
.good .word,.pass{color:var(--good)}
.bad .word,.fail{color:var(--bad)}
.word{font-weight:800;letter-spacing:.04em;margin-right:.35rem}
.note{color:var(--soft);font-size:.9rem}
.scroll{overflow-x:auto;margin:.5rem 0;border:1px solid var(--rule);border-radius:6px}
table{border-collapse:collapse;width:100%;font-size:.875rem}
caption{text-align:left;color:var(--soft);padding:.5rem .75rem;font-size:.85rem}
th,td{text-align:left;padding:.4rem .75rem;border-top:1px solid var(--rule);vertical-align:top;white-space:nowrap}
td.words,.changes td{white-space:normal;min-width:16rem;overflow-wrap:anywhere}
.layouts td.words{min-width:9rem}
thead th{color:var(--soft);font-weight:600;background:var(--card)}
tbody th{font-weight:600;background:var(--paper)}
.layouts tbody th{position:sticky;left:0}
td small,th small{display:block;color:var(--soft);font-weight:400}
.number{font-variant-numeric:tabular-nums}
.fail,.pass{font-weight:700}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.25rem 1rem;margin:.5rem 0}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
details{margin:.5rem 0}
summary{cursor:pointer;padding:.3rem 0}
.legend{display:flex;flex-wrap:wrap;gap:.4rem;margin:.75rem 0}
.legend button{display:inline-flex;align-items:center;gap:.45rem;font:inherit;font-size:.8rem;color:inherit;
background:var(--paper);border:1px solid var(--rule);border-radius:999px;padding:.25rem .7rem;min-height:2rem;
cursor:pointer;max-width:100%;overflow-wrap:anywhere;text-align:left}
.legend button svg{flex:none}
.legend button[aria-pressed=true]{border-color:var(--ink);background:var(--card);box-shadow:inset 0 0 0 1px var(--ink)}
:focus-visible{outline:2px solid var(--focus);outline-offset:2px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,23rem),1fr));gap:1rem}
figure{margin:0;border:1px solid var(--rule);border-radius:6px;padding:.6rem;min-width:0}
figcaption{font-weight:600;font-size:.9rem;margin-bottom:.3rem}
.axis-name{font-size:.75rem;color:var(--soft);margin:.3rem 0 0}
.chart{display:block;width:100%;height:auto}
svg text{font-size:11px;fill:var(--soft)}
svg .grid{stroke:var(--rule);stroke-width:.6}
svg .base{stroke:var(--soft);stroke-width:1}
svg .line,svg .thin,svg .under{fill:none;stroke:hsl(var(--hue) 75% var(--line-light));stroke-linejoin:round}
svg .line{stroke-width:3.2}
svg .thin{stroke-width:1;opacity:.55}
svg .under{stroke-width:1;opacity:.5}
svg .mark{fill:var(--paper);stroke:hsl(var(--hue) 75% var(--line-light));stroke-width:1.5}
svg .stands-out .mark{fill:hsl(var(--hue) 75% var(--line-light))}
svg .backdrop{fill:none;stroke:var(--soft);stroke-width:11;opacity:.22;stroke-linecap:round;stroke-linejoin:round}
svg .limit{stroke:var(--bad);stroke-width:1.3;stroke-dasharray:5 3}
svg .limit-label{fill:var(--bad)}
.curve{transition:opacity .15s}
.curve.faint{opacity:.08}
.heat{display:block;max-width:none}
.heat .b0{fill:var(--b0);stroke:var(--b2);stroke-width:.6}.heat .b1{fill:var(--b1)}.heat .b2{fill:var(--b2)}
.heat .b3{fill:var(--b3)}.heat .b4{fill:var(--b4)}.heat .b5{fill:var(--b5)}.heat .b6{fill:var(--b6)}
.heat .b7{fill:var(--b7)}.heat .b8{fill:var(--b8)}
.heat .none{fill:none;stroke:var(--rule);stroke-dasharray:2 2}
.heat .cross{stroke:var(--cross);stroke-width:1.7;fill:none}
.heat .b8+.cross{stroke:var(--cross8)}
.heat-legend{display:flex;flex-wrap:wrap;gap:.3rem .9rem;list-style:none;padding:0;margin:.5rem 0;font-size:.8rem}
.heat-legend li{display:inline-flex;align-items:center;gap:.35rem}
.heat-legend .tolerance{border-left:2px solid var(--bad);border-right:2px solid var(--bad);padding:0 .5rem;
color:var(--bad);font-weight:700}
@media (max-width:40rem){.layouts tbody th{white-space:normal;max-width:8.5rem}th,td{padding:.4rem .5rem}
td.words{min-width:13rem}}
@media print{.scroll{overflow:visible}.legend button{border:0}}
@media (prefers-reduced-motion:reduce){.curve{transition:none}}
"""

SCRIPT = """
const buttons = document.querySelectorAll("[data-pick]");
for (const button of buttons) button.addEventListener("click", () => {
  const picked = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.pick;
  for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset.pick === picked));
  for (const curve of document.querySelectorAll("[data-curve]"))
    curve.classList.toggle("faint", picked !== null && curve.dataset.curve !== picked);
});
"""
