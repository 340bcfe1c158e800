// Small charts as SVG. Every name and word is set as text, never as markup, so that odd names of layers do no harm.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function node(parent, tag, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}

function element(parent, tag, className, text = null) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}

// Numbers in three digits.

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

function figure(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-4 && size < 1e5) return String(Number(value.toPrecision(3)));
  const [digits, power] = value.toExponential(1).split("e");
  return (digits === "1.0" ? "" : digits + " × ") + "10" + powerOf(Number(power));
}

function powerOf(power) {
  return (power < 0 ? "⁻" : "") + [...String(Math.abs(power))].map((digit) => SUPERSCRIPTS[digit]).join("");
}

const percent = (value) => (value === null ? "–" : figure(100 * value) + " %");
const whole = (value) => value.toLocaleString("en");
const seconds = (value) => (value >= 90 ? figure(value / 60) + " min" : value < 0.01 ? "< 0.01 s" : figure(value) + " s");
const bytes = (value) => (value >= 2 ** 30 ? figure(value / 2 ** 30) + " GiB" : figure(value / 2 ** 20) + " MiB");

// Scales: `at` is where a value is drawn, from 0 (bottom) to 1 (top).

function fromZero(values, top = null) {
  const highest = top ?? (Math.max(...values.filter(Number.isFinite), 0) || 1);
  const power = 10 ** Math.floor(Math.log10(highest / 4));
  const step = power * [1, 2, 5, 10].find((factor) => highest / (power * factor) <= 5);
  const end = top ?? step * Math.ceil(highest / step - 1e-9);
  const ticks = [];
  for (let value = 0; value <= end * 1.0001; value += step) ticks.push(value);
  return { ticks, at: (value) => value / end };
}

function decades(values) {
  const shown = values.filter((value) => Number.isFinite(value) && value > 0);
  const high = Math.ceil(Math.log10(Math.max(...shown, 1e-12)) - 1e-9);
  let low = Math.floor(Math.log10(Math.min(...shown, 10 ** high)) + 1e-9);
  low = Math.max(Math.min(low, high - 1), high - 8); // what is smaller is drawn at the bottom
  const factors = high - low === 1 ? [1, 2, 5] : [1];
  const every = high - low > 5 ? 2 : 1;
  const ticks = [];
  for (let power = high; power >= low; power -= every)
    for (const factor of factors) if (power < high || factor === 1) ticks.push(factor * 10 ** power);
  const at = (value) => (value > 0 ? Math.max(0, (Math.log10(value) - low) / (high - low)) : 0);
  return { ticks, at, positive: true };
}

// A frame: axes and their ticks. It returns where things are drawn.
//   y: a scale, with `format`        labels: one for each slot along the x-axis, or
//   x: a scale for numbers, with `format`        title: of the x-axis

function frame(holder, { y, labels = null, x = null, title = "", height = 200, name }) {
  holder.querySelector("svg")?.remove();
  const width = Math.max(240, holder.clientWidth);
  const slots = labels ? labels.length : 0;
  const every = labels ? Math.ceil((slots * 16) / (width - 60)) : 1;
  const most = width < 600 ? 14 : 20; // letters of a label
  const longest = labels ? Math.max(...labels.map((label) => shortened(label, most).length)) : 0;
  const left = 52, top = 8, bottom = labels ? Math.min(96, 22 + longest * 4.3) : title ? 38 : 22;
  const svg = node(holder, "svg", {
    viewBox: `0 0 ${width} ${height + top + bottom}`, role: "img", "aria-label": name ?? title,
  });
  const inner = width - left - 10;
  const area = {
    draws: (value) => Number.isFinite(value) && (value > 0 || !y.positive), // a logarithmic axis has no zero
    svg, inner, height, left, top,
    slot: slots ? inner / slots : 0,
    x: (value) => left + (slots ? ((value + 0.5) * inner) / slots : x.at(value) * inner),
    y: (value) => top + height * (1 - y.at(value)),
  };
  for (const tick of y.ticks) {
    node(svg, "line", { class: "grid", x1: left, x2: width - 10, y1: area.y(tick), y2: area.y(tick) });
    node(svg, "text", { x: left - 6, y: area.y(tick) + 3.5, "text-anchor": "end" }, y.format(tick));
  }
  labels?.forEach((label, index) => {
    if (index % every) return;
    const [at, below] = [area.x(index) + 3, top + height + 12];
    const text = { x: at, y: below, "text-anchor": "end", transform: `rotate(-42 ${at} ${below})` };
    node(svg, "text", text, shortened(label, most));
  });
  for (const tick of x?.ticks ?? [])
    node(svg, "text", { x: area.x(tick), y: top + height + 16, "text-anchor": "middle" }, x.format(tick));
  if (title) {
    const middle = { x: left + inner / 2, y: top + height + bottom - 4, "text-anchor": "middle", class: "title" };
    node(svg, "text", middle, title);
  }
  return area;
}

function shortened(label, most) {
  return label.length > most ? "…" + label.slice(1 - most) : label;
}

// A line through points [x, value, words for the pointer]. A missing value is a gap.

function line(area, points, className) {
  const shown = points.filter(([, value]) => area.draws(value));
  const path = shown.map(([x, value]) => `${area.x(x).toFixed(1)},${area.y(value).toFixed(1)}`).join(" ");
  node(area.svg, "polyline", { class: className, points: path });
}

function dots(area, points, className, series, radius = 3) {
  for (const [x, value, words] of points) {
    if (!Number.isFinite(value)) continue;
    const circle = { class: area.draws(value) ? className : "nothing", cx: area.x(x), cy: area.y(value), r: radius };
    const made = node(area.svg, "circle", { ...circle, "data-series": series, "data-x": x, "data-value": value });
    if (words) hover(made, words);
  }
}

// What one slot shows under the pointer, and what a click on it does. The whole height of the slot reacts.

function slots(area, count, words, click = null) {
  for (let index = 0; index < count; index++) {
    const x = area.x(index) - area.slot / 2;
    const size = { x, y: area.top, width: area.slot, height: area.height };
    const hit = node(area.svg, "rect", { class: click ? "hit click" : "hit", "data-slot": index, ...size });
    hover(hit, () => words(index));
    if (click) hit.addEventListener("click", () => click(index));
  }
}

const tip = document.getElementById("tip");

function hover(target, words) {
  target.addEventListener("pointermove", (event) => {
    tip.replaceChildren();
    const [first, ...rest] = typeof words === "function" ? words() : words;
    element(tip, "strong", "", first);
    for (const text of rest) element(tip, "div", "", text);
    tip.hidden = false;
    const { offsetWidth: wide, offsetHeight: high } = tip;
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - wide - 8)) + "px";
    tip.style.top = (event.clientY + high + 24 > innerHeight ? event.clientY - high - 12 : event.clientY + 16) + "px";
  });
  target.addEventListener("pointerleave", () => { tip.hidden = true; });
}
