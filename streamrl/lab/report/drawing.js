// What all diagrams are made of: elements, axes with units, numbers in words, one label that follows the pointer.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

// A new element. Texts become text nodes, never markup.
function make(name, attributes = {}, ...children) {
  const isSvg = make.svg.has(name);
  const node = isSvg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "colour") node.style.setProperty("--colour", value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}
make.svg = new Set(["svg", "g", "path", "line", "rect", "circle", "text"]);

// Colour of a run, or of a curve where there is one run: from the page's style, so that dark and light differ.
const runColour = (index) => `var(--run-${index % 8})`;
const DASHES = [null, "5 4", "1.5 3.5"];

// At most `count` round values from low to high.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) {
    found.push(Number((index * step).toPrecision(12)));
  }
  return found;
}

// 0.00123 -> "0.00123", 12345 -> "12.3k", 4.56e8 -> "456M"
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [limit, suffix, unit] of [
    [1e9, "G", 1e9],
    [1e6, "M", 1e6],
    [1e4, "k", 1e3],
  ]) {
    if (size >= limit * 0.9995) return `${Number((value / unit).toPrecision(3))}${suffix}`;
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("e-", "e−").replace(/^-/, "−");
  return String(Number(value.toPrecision(4))).replace(/^-/, "−");
}

const percent = (share) => (share > 0 && share < 0.001 ? "<0.1%" : `${Number((100 * share).toPrecision(3))}%`);
const inUnit = (value, unit) => (value === null ? "–" : unit === "share" ? percent(value) : number(value));

// 93 -> "1 min 33 s"
function duration(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

// Unit in which a time axis of so many seconds is written.
function clock(seconds) {
  if (seconds > 2 * 86400) return { name: "days", size: 86400 };
  if (seconds > 2 * 3600) return { name: "hours", size: 3600 };
  return seconds > 300 ? { name: "minutes", size: 60 } : { name: "seconds", size: 1 };
}

// The one label that says the values under the pointer.
const label = make("div", { class: "label", hidden: true });

function showLabel(event, ...content) {
  label.replaceChildren(...content.flat(Infinity).filter(Boolean));
  label.hidden = false;
  const { width, height } = label.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
  const top = Math.min(event.clientY + 14, innerHeight - height - 6);
  label.style.left = `${Math.max(6, left)}px`;
  label.style.top = `${Math.max(6, top)}px`;
}

function hideLabel() {
  label.hidden = true;
}

// A line of the label: a mark of a colour, a name, a value.
const entry = (colour, name, value) =>
  make("div", { class: "entry" }, make("i", { colour }), make("span", {}, name), make("b", {}, value));

// What hears the pointer over a diagram: `tell(event, share)`, share 0..1 of the way from left to right.
// `cursor` is emptied when it leaves.
function pointerArea(svg, box, top, height, tell, cursor = null) {
  return make("rect", {
    class: "catch",
    x: box.left,
    y: top,
    width: box.right - box.left,
    height,
    onpointermove: (event) =>
      tell(event, (event.clientX - svg.getBoundingClientRect().left - box.left) / (box.right - box.left)),
    onpointerleave: () => {
      cursor?.replaceChildren();
      hideLabel();
    },
  });
}

// A diagram that is drawn anew when its width or the page's settings change.
const drawn = [];

function diagram(draw, height) {
  const holder = make("div", { class: "diagram" });
  holder.redraw = () => {
    const width = Math.max(220, holder.clientWidth || 420);
    holder.replaceChildren(draw(make("svg", { width, height, viewBox: `0 0 ${width} ${height}` }), width, height));
  };
  drawn.push(holder);
  return holder;
}

function redraw() {
  for (const holder of drawn) if (holder.isConnected) holder.redraw();
}

// The frame of a diagram: horizontal lines, both axes. Returns the scales.
function axes(svg, box, x, y) {
  const scaleX = (value) => box.left + ((value - x.low) / (x.high - x.low || 1)) * (box.right - box.left);
  const scaleY = (value) => box.bottom - ((value - y.low) / (y.high - y.low || 1)) * (box.bottom - box.top);
  for (const value of ticks(y.low, y.high, 4)) {
    const at = scaleY(value);
    svg.append(make("line", { class: "rule", x1: box.left, x2: box.right, y1: at, y2: at }));
    svg.append(make("text", { class: "tick", x: box.left - 7, y: at + 3.5, "text-anchor": "end" }, y.write(value)));
  }
  for (const value of ticks(x.low, x.high, Math.max(2, Math.floor((box.right - box.left) / 70)))) {
    const at = scaleX(value);
    svg.append(make("text", { class: "tick", x: at, y: box.bottom + 16, "text-anchor": "middle" }, x.write(value)));
  }
  svg.append(make("text", { class: "tick name", x: box.right, y: box.bottom + 31, "text-anchor": "end" }, x.name));
  return { x: scaleX, y: scaleY };
}
