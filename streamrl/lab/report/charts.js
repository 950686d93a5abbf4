// The kinds of diagrams: curves, shares that add up to one, counts side by side, strips of time.
"use strict";

const MARGIN = { left: 50, right: 10, top: 8, bottom: 36 };
const boxOf = (width, height) => ({
  left: MARGIN.left,
  right: width - MARGIN.right,
  top: MARGIN.top,
  bottom: height - MARGIN.bottom,
});

// Index of the value in an ascending list that is nearest to `wanted`.
function nearest(values, wanted) {
  let low = 0,
    high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle;
    else high = middle;
  }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
}

// Mean of each value and of those up to `half` places beside it; null stays null.
function smooth(values, half) {
  if (half < 1) return values;
  return values.map((value, index) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, index - half), index + half + 1).filter((each) => each !== null);
    return near.reduce((sum, each) => sum + each, 0) / near.length;
  });
}

// The path through points; a null breaks it.
function path(xs, ys, scale) {
  let text = "",
    isOpen = false;
  ys.forEach((y, index) => {
    if (y === null) {
      isOpen = false;
      return;
    }
    text += `${isOpen ? "L" : "M"}${scale.x(xs[index]).toFixed(1)} ${scale.y(y).toFixed(1)}`;
    isOpen = true;
  });
  return text;
}

// The area between two lists of values.
function area(xs, low, high, scale) {
  const places = xs.map((_, index) => index).filter((index) => low[index] !== null && high[index] !== null);
  if (!places.length) return "";
  const upper = places.map((index) => `${scale.x(xs[index]).toFixed(1)} ${scale.y(high[index]).toFixed(1)}`);
  const lower = places.reverse().map((index) => `${scale.x(xs[index]).toFixed(1)} ${scale.y(low[index]).toFixed(1)}`);
  return `M${upper.join("L")}L${lower.join("L")}Z`;
}

// Range of an axis over lists of values; from zero where that is not far away.
function range(lists) {
  let low = Infinity,
    high = -Infinity;
  for (const list of lists)
    for (const value of list) {
      if (value === null || value === undefined) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  if (low > high) return { low: 0, high: 1 };
  if (low > 0 && low < 0.6 * high) low = 0;
  if (low === high) return { low: Math.min(low, 0), high: high || 1 };
  return { low, high: high + 0.04 * (high - low) };
}

// Curves. lines: [{name, colour, dash, xs, ys, low?, high?}]; view(): {axis, half}; marks: [{x, text}].
function curves(lines, unit, view, marks = () => []) {
  return diagram((svg, width, height) => {
    const box = boxOf(width, height),
      axis = view().axis;
    const all = lines.map((line) => ({ ...line, at: line.xs(axis), smoothed: smooth(line.ys, view().half) }));
    const ends = all.filter((line) => line.at.length);
    const x = {
      low: Math.min(...ends.map((line) => line.at[0])),
      high: Math.max(...ends.map((line) => line.at.at(-1))),
      write: axis.write,
      name: axis.name,
    };
    const y = { ...range(all.flatMap((line) => [line.ys, line.low ?? [], line.high ?? []])) };
    y.write = (value) => inUnit(value, unit);
    const scale = axes(svg, box, x, y);
    for (const mark of marks(axis).filter((each) => each.x >= x.low && each.x <= x.high)) {
      const at = scale.x(mark.x);
      svg.append(make("line", { class: "mark", colour: mark.colour, x1: at, x2: at, y1: box.top, y2: box.bottom }));
    }
    for (const line of all) drawLine(svg, line, scale, view().half);
    const cursor = make("g", { class: "cursor" });
    svg.append(
      cursor,
      pointerArea(svg, box, 0, box.bottom, (event) => pointAt(event, svg, cursor, ends, scale, x, box, unit), cursor),
    );
    return svg;
  }, 190);
}

function drawLine(svg, line, scale, half) {
  if (line.low)
    svg.append(make("path", { class: "band", colour: line.colour, d: area(line.at, line.low, line.high, scale) }));
  if (half >= 1) svg.append(make("path", { class: "raw", colour: line.colour, d: path(line.at, line.ys, scale) }));
  svg.append(
    make("path", {
      class: "line",
      colour: line.colour,
      "stroke-dasharray": line.dash,
      d: path(line.at, line.smoothed, scale),
    }),
  );
  if (line.at.length === 1 && line.ys[0] !== null) {
    svg.append(
      make("circle", { class: "dot", colour: line.colour, cx: scale.x(line.at[0]), cy: scale.y(line.ys[0]), r: 3 }),
    );
  }
}

// The values under the pointer: a dot on each curve, and the label.
function pointAt(event, svg, cursor, lines, scale, x, box, unit) {
  const share = (event.clientX - svg.getBoundingClientRect().left - box.left) / (box.right - box.left);
  const wanted = x.low + share * (x.high - x.low);
  const places = lines.map((line) => nearest(line.at, wanted));
  const first = lines[0].at[places[0]];
  cursor.replaceChildren(
    make("line", { x1: scale.x(first), x2: scale.x(first), y1: box.top, y2: box.bottom }),
    ...lines
      .map((line, index) =>
        line.ys[places[index]] === null
          ? null
          : make("circle", {
              class: "dot",
              colour: line.colour,
              cx: scale.x(line.at[places[index]]),
              cy: scale.y(line.smoothed[places[index]]),
              r: 3.5,
            }),
      )
      .filter(Boolean),
  );
  showLabel(
    event,
    make("div", { class: "head" }, `${x.write(first)} ${x.name}`),
    lines.map((line, index) => entry(line.colour, line.name, inUnit(line.ys[places[index]], unit))),
  );
}

// Shares that add up to one, over the axis: parts: [{name, colour, ys}].
function shares(xs, parts, view) {
  return diagram((svg, width, height) => {
    const box = boxOf(width, height),
      axis = view().axis,
      at = xs(axis);
    const x = { low: at[0], high: at.at(-1), write: axis.write, name: axis.name };
    const scale = axes(svg, box, x, { low: 0, high: 1, write: percent });
    // A column for each point, from half way to the one before to half way to the next.
    const sides = [at[0], ...at.slice(1).map((value, index) => (value + at[index]) / 2), at.at(-1)];
    const doubled = (values) => values.flatMap((value) => [value, value]);
    const columns = at.flatMap((_, index) => [sides[index], sides[index + 1]]);
    let below = at.map(() => 0);
    for (const part of parts) {
      const ys = smooth(part.ys, view().half);
      const above = below.map((value, index) => value + ys[index]);
      svg.append(
        make("path", { class: "part", colour: part.colour, d: area(columns, doubled(below), doubled(above), scale) }),
      );
      below = above;
    }
    const cursor = make("g", { class: "cursor" });
    svg.append(
      cursor,
      pointerArea(svg, box, 0, box.bottom, (event, share) => {
        const place = nearest(at, x.low + share * (x.high - x.low));
        const line = { x1: scale.x(at[place]), x2: scale.x(at[place]), y1: box.top, y2: box.bottom };
        cursor.replaceChildren(make("line", line));
        showLabel(
          event,
          make("div", { class: "head" }, `${x.write(at[place])} ${x.name}`),
          parts
            .filter((part) => part.ys[place] > 0)
            .map((part) => entry(part.colour, part.name, percent(part.ys[place]))),
        );
      }, cursor),
    );
    return svg;
  }, 190);
}

// Counts as shares of their sum, in bins that all sets have in common.
// sets: [{name, colour, dash, values: [share of each bin]}]; bins: [text of each bin]; edges: [text of each tick].
function histogram(sets, bins, name, edges) {
  return diagram((svg, width, height) => {
    const box = boxOf(width, height);
    const y = { ...range(sets.map((set) => [0, ...set.values])), write: percent };
    const scale = axes(svg, box, { low: 0, high: bins.length, write: () => "", name }, y);
    const every = Math.ceil(edges.length / Math.max(2, Math.floor((box.right - box.left) / 46)));
    edges.forEach((text, index) => {
      const at = scale.x(index + (edges.length === bins.length ? 0.5 : 0));
      if (index % every === 0)
        svg.append(make("text", { class: "tick", x: at, y: box.bottom + 16, "text-anchor": "middle" }, text));
    });
    for (const set of sets) {
      const steps = set.values.map((value, index) =>
        [index, index + 1].map((edge) => `${edge ? "L" : "M"}${scale.x(edge).toFixed(1)} ${scale.y(value).toFixed(1)}`),
      );
      const floor = `L${scale.x(bins.length)} ${scale.y(0)}L${scale.x(0)} ${scale.y(0)}Z`;
      if (!set.dash) svg.append(make("path", { class: "fill", colour: set.colour, d: steps.flat().join("") + floor }));
      svg.append(
        make("path", { class: "line", colour: set.colour, "stroke-dasharray": set.dash, d: steps.flat().join("") }),
      );
    }
    svg.append(
      pointerArea(svg, box, 0, box.bottom, (event, share) => {
        const bin = Math.max(0, Math.min(bins.length - 1, Math.floor(share * bins.length)));
        showLabel(
          event,
          make("div", { class: "head" }, `${bins[bin]} ${name}`),
          sets.map((set) => entry(set.colour, set.name, percent(set.values[bin]))),
        );
      }),
    );
    return svg;
  }, 190);
}

// One strip of time for each role. strips: [{name, slices: {phase: [share of each slice]}}]; colours: phase: colour.
function strips(lines, seconds, colours) {
  const row = 26,
    left = 104;
  return diagram(
    (svg, width, height) => {
      const box = { left, right: width - 10, top: 4, bottom: height - 30 };
      const unit = clock(seconds);
      for (const value of ticks(0, seconds / unit.size, Math.max(2, Math.floor((box.right - left) / 80)))) {
        const at = left + ((value * unit.size) / seconds) * (box.right - left);
        svg.append(make("line", { class: "rule", x1: at, x2: at, y1: box.top, y2: box.bottom }));
        svg.append(make("text", { class: "tick", x: at, y: box.bottom + 15, "text-anchor": "middle" }, number(value)));
      }
      svg.append(
        make("text", { class: "tick name", x: left - 10, y: box.bottom + 15, "text-anchor": "end" }, unit.name),
      );
      lines.forEach((line, index) => drawStrip(svg, line, box, box.top + index * row, seconds, colours));
      return svg;
    },
    lines.length * row + 34,
  );
}

function drawStrip(svg, line, box, top, seconds, colours) {
  const names = Object.keys(line.slices).sort((some, other) => order(some) - order(other));
  const count = names.length ? line.slices[names[0]].length : 0;
  const size = (box.right - box.left) / Math.max(1, count);
  const parts = Object.fromEntries(names.map((name) => [name, ""]));
  for (let slice = 0; slice < count; slice++) {
    let foot = top + 20;
    for (const name of names) {
      const height = 18 * line.slices[name][slice];
      if (height <= 0) continue;
      const x = (box.left + slice * size).toFixed(2);
      parts[name] +=
        `M${x} ${foot.toFixed(2)}h${(size + 0.3).toFixed(2)}v${(-height).toFixed(2)}h${(-size - 0.3).toFixed(2)}Z`;
      foot -= height;
    }
  }
  svg.append(make("text", { class: "tick strip", x: box.left - 10, y: top + 15, "text-anchor": "end" }, line.name));
  for (const name of names) svg.append(make("path", { class: "part", colour: colours(name), d: parts[name] }));
  svg.append(
    pointerArea(svg, box, top, 22, (event, share) => {
      const slice = Math.max(0, Math.min(count - 1, Math.floor(share * count)));
      showLabel(
        event,
        make("div", { class: "head" }, `${line.name}, ${duration(share * seconds)} after the start`),
        names
          .filter((name) => line.slices[name][slice] > 0.004)
          .map((name) => entry(colours(name), name, percent(line.slices[name][slice]))),
      );
    }),
  );
}
