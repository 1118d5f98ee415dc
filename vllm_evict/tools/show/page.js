"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const [slider, select, said, about, picture, now] = ["step", "part", "said", "about", "picture", "now"].map(
  (id) => document.getElementById(id));
const blocks = [...document.querySelectorAll("#text .b")], GONE = ".", HOST = "h";
const count = (number) => +number.toFixed(1);

/** Heads that are shown, by KV group; layers whose reads are shown; blocks that these read in each step. */
let groups, heads, reads;
function choose() {
  const parts = select.value === "" ? data.parts : [data.parts[+select.value]];
  groups = new Map();
  for (const part of parts) groups.set(part.group, (groups.get(part.group) ?? 0) + part.heads);
  heads = [...groups.values()].reduce((sum, each) => sum + each);
  const layers = parts.map((part) => part.layer);
  reads = data.steps.map((step) => new Set(step.reads.filter((_, layer) => layers.includes(layer)).flat()));
  draw();
}

/** What became of a block by a step: shares of the shown heads that kept it or have it on the host, and importance. */
function fate(at, block) {
  const step = data.steps[at - 1], found = { kept: 0, host: 0, gone: 0, shade: null, read: false };
  const computed = step?.computed ?? data.steps[0]?.computed ?? data.tokens;
  if (block * data.size >= computed) return null;
  for (const [group, share] of groups) {
    const its = step?.fates[group][block];
    found[its === GONE ? "gone" : its === HOST ? "host" : "kept"] += share / heads;
    if (its >= "0" && its <= "9") found.shade = Math.max(found.shade ?? 0, +its);
  }
  found.read = at > 0 && reads[at - 1].has(block);
  return found;
}

/** The first step after which no shown head keeps a block; 0: none. */
function goneBy(block) {
  return data.steps.findIndex((_, at) => fate(at + 1, block)?.gone > 0.999) + 1;
}

const opacity = (found) => (0.15 + 0.085 * (found.shade ?? 9)) * found.kept;

function show() {
  const step = +slider.value, totals = { kept: 0, host: 0, gone: 0 };
  let known = 0;
  blocks.forEach((block, at) => {
    const found = fate(step, at);
    block.className = "b";
    if (!found) return block.classList.add("later");
    known += 1;
    for (const name in totals) totals[name] += found[name];
    if (found.gone > 0.999) block.classList.add("gone");
    else if (found.kept === 0) block.classList.add("host");
    else block.classList.add("kept");
    block.style.setProperty("--shade", opacity(found));
    block.classList.toggle("read", found.read);
  });
  const where = step ? `After step ${step} of ${data.steps.length}, at ${data.steps[step - 1].computed} tokens` :
    "Before the first step";
  const host = data.steps.some(({ fates }) => fates.join("").includes(HOST)) ? `, ${count(totals.host)} on the host` : "";
  said.textContent = `${where}: ${count(totals.kept)} of ${known} blocks kept${host}, ` +
    `${count(totals.gone)} evicted${groups.size > 1 ? " (mean of all heads)" : ""}.`;
  now.style.top = `${(100 * step) / (data.steps.length + 1)}%`;
  now.style.height = `${100 / (data.steps.length + 1)}%`;
}

/** Draw a row for each step, and note in each block by which step it was gone. */
function draw() {
  picture.width = Math.max(blocks.length, 1);
  picture.height = data.steps.length + 1;
  picture.style.height = `${Math.min(Math.max(6 * picture.height, 24), 320)}px`;
  const context = picture.getContext("2d");
  for (let step = 0; step <= data.steps.length; step++) {
    for (let block = 0; block < blocks.length; block++) {
      const found = fate(step, block);
      if (!found) continue;
      const [colour, share] = found.gone > 0.999 ? ["192,57,43", 0.25] : found.kept === 0 ? ["230,126,34", 0.5] :
        ["46,134,193", opacity(found)];
      context.fillStyle = found.read ? "rgb(30,132,73)" : `rgba(${colour},${share})`;
      context.fillRect(block, step, 1, 1);
    }
  }
  blocks.forEach((block, at) => { block.dataset.gone = goneBy(at) || ""; });
  show();
}

/** Words about a block: what became of it, and which decodes read it. */
function tell(at) {
  const end = Math.min((at + 1) * data.size, data.tokens), gone = +blocks[at].dataset.gone;
  const reads = data.steps.filter((_, step) => fate(step + 1, at)?.read).map(({ computed }) => computed);
  const found = fate(+slider.value, at), last = fate(data.steps.length, at);
  let words = gone ? `evicted by step ${gone}, at ${data.steps[gone - 1].computed} tokens` :
    !last || last.kept > 0.999 ? "kept" : last.host > 0.999 ? "on the host at the end" :
    `kept by ${Math.round(100 * last.kept)} % of the heads`;
  if (found?.shade != null) words += `; importance ${found.shade + 1} of 10 at this step`;
  if (reads.length) words += `; read by the decodes at tokens ${reads.join(", ")}`;
  about.textContent = `Tokens ${at * data.size} to ${end - 1}: ${words}.`;
}

const go = (step) => { slider.value = step; show(); };
slider.addEventListener("input", show);
select.addEventListener("change", choose);
document.getElementById("before").addEventListener("click", () => go(+slider.value - 1));
document.getElementById("after").addEventListener("click", () => go(+slider.value + 1));
picture.addEventListener("click", (event) => {
  go(Math.floor((event.offsetY / picture.clientHeight) * (data.steps.length + 1)));
});
for (const kind of ["click", "mouseover"]) {
  document.getElementById("text").addEventListener(kind, (event) => {
    const at = blocks.indexOf(event.target.closest(".b"));
    if (at >= 0) tell(at);
  });
}
choose();
