// Draws the charts of a report from its data, and makes its table sort, filter and open layers.
"use strict";

const report = JSON.parse(document.getElementById("data").textContent);
const layers = report.layers;
const byId = (id) => document.getElementById(id);
const masked = (layer) => layer.solves[sweep]?.loss_masked ?? null;
const readjusted = (layer) => layer.solves[sweep]?.loss ?? null;
const inClosedForm = (layer) => { // where Newton's method began, if it began there
  const solve = layer.solves[sweep];
  return solve?.start === "least squares" && solve.newton_steps ? solve.loss_start : null;
};
const scale = (made, format) => ({ ...made, format });
let selected = null;
let sweep = 0; // whose losses are drawn

function drawLosses(holder) {
  const before = layers.map((layer, index) => [index, masked(layer)]);
  const after = layers.map((layer, index) => [index, readjusted(layer)]);
  const y = scale(decades([...before, ...after].map(([, value]) => value)), figure);
  const area = frame(holder, { y, labels: layers.map((layer) => layer.name), name: "loss of every layer" });
  layers.forEach((layer, index) => {
    if (masked(layer) === null || readjusted(layer) === null) return;
    const ends = { y1: area.y(masked(layer)), y2: area.y(readjusted(layer)) };
    node(area.svg, "line", { class: "stem", x1: area.x(index), x2: area.x(index), ...ends });
  });
  const radius = Math.max(1.8, Math.min(4, area.slot / 4));
  dots(area, before, "masked", "masked", radius);
  dots(area, layers.map((layer, index) => [index, inClosedForm(layer)]), "layerwise", "closed-form", radius);
  dots(area, after, "snows", "snows", radius);
  slots(area, layers.length, lossWords, select);
}

function lossWords(index) {
  const layer = layers[index];
  const before = sweep ? "before" : "mask only";
  const closed = inClosedForm(layer) === null ? [] : [`closed form ${figure(inClosedForm(layer))}`];
  return [layer.name, `${before} ${figure(masked(layer))}`, ...closed, `re-adjusted ${figure(readjusted(layer))}`, `K = ${layer.horizon}`];
}

function drawDensity(holder) {
  const y = scale(fromZero([], 1), percent);
  const area = frame(holder, { y, labels: layers.map((layer) => layer.name), height: 130, name: "kept weights" });
  const width = Math.max(1, area.slot * 0.72);
  layers.forEach((layer, index) => {
    const kept = layer.kept / layer.weights;
    const box = { x: area.x(index) - width / 2, width };
    node(area.svg, "rect", { class: "removed", ...box, y: area.y(1), height: area.y(kept) - area.y(1) });
    const bar = { class: "snows", ...box, y: area.y(kept), height: area.y(0) - area.y(kept) };
    node(area.svg, "rect", { ...bar, "data-series": "density", "data-x": index, "data-value": kept });
  });
  slots(area, layers.length, densityWords, select);
}

function densityWords(index) {
  const layer = layers[index];
  const counts = `${whole(layer.kept)} of ${whole(layer.weights)} weights kept`;
  return [layer.name, counts, `${percent(layer.sparsity)} removed, pattern ${layer.pattern}`];
}

function drawFinish(holder) {
  const { curve, steps } = report.finish;
  const y = scale(fromZero(curve.map(([, loss]) => loss)), figure);
  const x = scale({ ticks: [0, steps / 2, steps], at: (step) => step / steps }, figure);
  const area = frame(holder, { y, x, title: "steps", height: 170, name: "loss of the last stage" });
  line(area, curve, "snows");
  dots(area, curve.map(([step, loss]) => [step, loss, [`step ${step}`, `loss ${figure(loss)}`]]), "snows", "finish");
}

// One layer

function convergence(layer) {
  // Points of all sweeps one after another: masked, start, and after each Newton step. A sweep has its own problem.
  const names = [], fitted = [], heldOut = [], begins = [];
  layer.solves.forEach((solve, number) => {
    const tried = solve.held_out_tried ?? {};
    const add = (name, loss, held) => {
      fitted.push([names.length, loss]);
      heldOut.push([names.length, held ?? null]);
      names.push(name);
    };
    begins.push(names.length);
    add("masked", solve.loss_masked, tried["masked weights"]);
    const steps = solve.losses ?? [];
    if (solve.start !== "masked weights") add(solve.start, solve.loss_start, tried[solve.start]);
    for (let step = 1; step < steps.length; step++) {
      const held = step === steps.length - 1 ? tried.solved : null;
      add(steps.length > 2 ? `Newton step ${step}` : "Newton step", steps[step], held);
    }
    if (solve.kept !== "solved" && tried[solve.kept] !== undefined) add(`kept: ${solve.kept}`, solve.loss, tried[solve.kept]);
  });
  return { names, fitted, heldOut, begins };
}

function drawNewton(holder) {
  const { names, fitted, heldOut, begins } = convergence(layers[selected]);
  const y = scale(decades([...fitted, ...heldOut].map(([, value]) => value)), figure);
  const area = frame(holder, { y, labels: names, height: 170, name: "loss on the way" });
  begins.forEach((begin, sweep) => {
    line(area, fitted.slice(begin, begins[sweep + 1]), "snows");
    line(area, heldOut.slice(begin, begins[sweep + 1]), "held dashed");
  });
  dots(area, fitted, "snows", "fitted");
  dots(area, heldOut, "held", "held-out");
  const sweepOf = (index) => begins.filter((begin) => begin <= index).length;
  const words = (index) => [`${names[index]}, sweep ${sweepOf(index)}`, `fitted ${figure(fitted[index][1])}`, `held out ${figure(heldOut[index][1])}`];
  slots(area, names.length, words);
}

function drawCG(holder) {
  const runs = layers[selected].solves.flatMap((solve) => solve.cg_residuals ?? []);
  const longest = Math.max(1, ...runs.map((run) => run.length));
  const y = scale(decades([1, ...runs.flat()]), figure);
  const x = scale(fromZero([longest]), figure);
  const ticks = x.ticks.filter(Number.isInteger);
  const area = frame(holder, { y, x: { ...x, ticks }, title: "CG steps", height: 170, name: "residual of CG" });
  runs.forEach((run, number) => {
    const words = (step, norm) => [`Newton step ${number + 1}, CG step ${step}`, `residual ${figure(norm)}`];
    const points = [[0, 1], ...run.map((norm, step) => [step + 1, norm, words(step + 1, norm)])];
    const faint = runs.length > 1 ? ` run${Math.min(3, runs.length - 1 - number)}` : "";
    line(area, points, "snows" + faint);
    dots(area, points.slice(1), "snows" + faint, `cg-${number}`, 2.2);
  });
}

function drawWeights(holder) {
  const { low, high, before, after } = layers[selected].picture;
  const y = scale(fromZero([...before, ...after]), percent);
  const ends = { ticks: [low, 0, high], at: (value) => (value - low) / (high - low) };
  const area = frame(holder, { y, x: scale(ends, figure), title: "weight", height: 170, name: "weights" });
  const wide = area.inner / before.length;
  before.forEach((share, bin) => {
    const at = { x: area.left + bin * wide, width: Math.max(0.5, wide - 1) };
    const words = () => [
      `${figure(low + ((high - low) * bin) / before.length)} to ${figure(low + ((high - low) * (bin + 1)) / before.length)}`,
      `dense ${percent(before[bin])}`, `kept ${percent(after[bin])}`,
    ];
    for (const [series, value] of [["dense", share], ["snows", after[bin]]]) {
      const bar = { class: series, ...at, y: area.y(value), height: area.y(0) - area.y(value) };
      node(area.svg, "rect", { ...bar, "data-series": `weights-${series}`, "data-x": bin, "data-value": value });
    }
    hover(node(area.svg, "rect", { class: "hit", ...at, y: area.top, height: area.height }), words);
  });
}

function drawPicture(holder) {
  const { rows, columns, bits } = layers[selected].picture;
  const packed = Uint8Array.from(atob(bits), (letter) => letter.charCodeAt(0));
  const canvas = holder.querySelector("canvas") ?? element(holder, "canvas", "");
  const wide = Math.max(2, Math.min(12, Math.floor(holder.clientWidth / columns)));
  const ratio = window.devicePixelRatio || 1;
  canvas.width = columns * wide * ratio;
  canvas.height = rows * wide * ratio;
  canvas.style.width = columns * wide + "px";
  canvas.style.height = rows * wide + "px";
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const colors = [style.getPropertyValue("--removed"), style.getPropertyValue("--snows")];
  for (let index = 0; index < rows * columns; index++) {
    const kept = (packed[index >> 3] >> (7 - (index & 7))) & 1;
    pen.fillStyle = colors[kept];
    pen.fillRect((index % columns) * wide, Math.floor(index / columns) * wide, wide - 1, wide - 1);
  }
}

function drawPhases(holder) {
  holder.querySelector(".bars")?.remove();
  const bars = element(holder, "div", "bars");
  const longest = Math.max(...report.phases.map((phase) => phase.seconds)) || 1;
  for (const phase of report.phases) {
    element(bars, "span", "what", phase.name);
    const bar = element(element(bars, "span", "track"), "i", "");
    bar.style.width = (100 * phase.seconds) / longest + "%";
    Object.assign(bar.dataset, { series: "phase", value: phase.seconds });
    element(bars, "span", "number", seconds(phase.seconds));
    const peak = element(bars, "span", "number faint", phase.peak_bytes === null ? "" : bytes(phase.peak_bytes));
    peak.dataset.series = "memory";
  }
}

function drawOperations(holder) {
  const { names, errors } = report.operations;
  const curves = Object.entries(errors);
  const y = scale(decades(curves.flatMap(([, values]) => values)), percent);
  const area = frame(holder, { y, labels: names, name: "error of every operation" });
  for (const [series, values] of curves) {
    const points = values.map((value, index) => [index, value]);
    line(area, points, curveClass(series));
    dots(area, points, curveClass(series), series, Math.max(1, Math.min(2.5, area.slot / 4)));
  }
  slots(area, names.length, (at) => [names[at], ...curves.map(([name, values]) => `${name} ${percent(values[at])}`)]);
}

function curveClass(series) {
  const known = { "mask only": "masked", SNOWS: "snows" };
  return known[series] ?? (series.startsWith("before") ? "snows dashed" : "layerwise");
}

const CHARTS = {
  "chart-loss": drawLosses, "chart-operations": drawOperations, "chart-density": drawDensity,
  "chart-phases": drawPhases, "chart-finish": drawFinish, "chart-newton": drawNewton, "chart-cg": drawCG,
  "chart-weights": drawWeights, "chart-picture": drawPicture,
};

function draw() {
  for (const [id, drawChart] of Object.entries(CHARTS)) {
    const holder = byId(id);
    if (holder && !holder.closest("[hidden]")) drawChart(holder);
  }
}

// Which layer is shown

function select(index, scroll = true) {
  selected = index;
  const layer = layers[index];
  byId("layer-choice").value = index;
  byId("layer-name").textContent = layer.name;
  byId("layer-facts").textContent = byId(`row-${index}`).dataset.facts;
  byId("layer-advice").textContent = byId(`row-${index}`).dataset.advice ?? "";
  show("layer-advice", Boolean(byId(`row-${index}`).dataset.advice));
  show("part-newton", layer.solves.some((solve) => solve.loss_masked !== null));
  show("part-cg", layer.solves.some((solve) => solve.cg_residuals?.length));
  show("part-weights", Boolean(layer.picture));
  show("part-picture", Boolean(layer.picture));
  for (const row of document.querySelectorAll("tr.selected")) row.classList.remove("selected");
  byId(`row-${index}`).classList.add("selected");
  for (const id of ["chart-newton", "chart-cg", "chart-weights", "chart-picture"]) {
    if (!byId(id).closest("[hidden]")) CHARTS[id](byId(id));
  }
  try {
    history.replaceState(null, "", `#layer-${index}`); // a page that is read again shows the same layer
  } catch { /* not allowed inside a notebook */ }
  if (scroll) byId("layer").scrollIntoView({ behavior: "smooth", block: "start" });
}

function show(id, shown) {
  byId(id).hidden = !shown;
}

// The table

function sortBy(column, button) {
  const body = byId("layers").tBodies[0];
  const header = button.closest("th");
  const rising = header.getAttribute("aria-sort") !== "ascending";
  for (const other of byId("layers").querySelectorAll("th")) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
  const number = (row) => (key(row) === "" ? -Infinity : Number(key(row)));
  const numeric = header.classList.contains("number");
  const compare = (a, b) => (numeric ? number(a) - number(b) : key(a).localeCompare(key(b), "en", { numeric: true }));
  const rows = [...body.rows].sort((a, b) => (rising ? compare(a, b) : compare(b, a)));
  body.append(...rows);
}

function filter() {
  const wanted = byId("filter").value.toLowerCase();
  const marked = byId("only-worst")?.checked;
  let shown = 0;
  for (const row of byId("layers").tBodies[0].rows) {
    row.hidden = !row.textContent.toLowerCase().includes(wanted) || (marked && !row.dataset.advice);
    shown += !row.hidden;
  }
  byId("shown").textContent = shown === layers.length ? "" : `${shown} of ${layers.length} layers`;
}

function start() {
  if (layers.length) {
    document.querySelectorAll("#layers th button").forEach((button, column) => {
      button.addEventListener("click", () => sortBy(column, button));
    });
    document.querySelectorAll("[data-layer]").forEach((button) => {
      button.addEventListener("click", () => select(Number(button.dataset.layer)));
    });
    document.querySelectorAll("input[name=sweep]").forEach((button) => {
      button.addEventListener("change", () => { sweep = Number(button.value); drawLosses(byId("chart-loss")); });
    });
    byId("filter").addEventListener("input", filter);
    byId("only-worst")?.addEventListener("change", filter);
    byId("layer-choice").addEventListener("change", (event) => select(Number(event.target.value), false));
    const asked = Number(/^#layer-(\d+)$/.exec(location.hash)?.[1] ?? NaN);
    select(asked in layers ? asked : Number(byId("layer").dataset.first), false);
  }
  draw();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width !== innerWidth) draw();
    width = innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

start();
