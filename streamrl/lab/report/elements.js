// What the page is made of: elements, numbers in words, one label that follows the pointer.
"use strict";

// A new element. Texts become text nodes, never markup.
function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "colour") node.style.setProperty("--colour", value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

// Colour of a run, or of a curve where there is one run: from the page's style, so that dark and light differ.
const runColour = (index) => `var(--run-${index % 8})`;

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
