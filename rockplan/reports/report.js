"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const MIB = 1048576;
const WIDTH = 1000;
const LEFT = 64;

function bytes(n) {
  if (Math.abs(n) < 1024) return n + " B";
  for (const unit of ["KiB", "MiB"]) {
    n /= 1024;
    if (Math.abs(n) < 1024) return n.toFixed(1) + " " + unit;
  }
  return (n / 1024).toFixed(2) + " GiB";
}
const ms = (ns) => (ns / 1e6).toFixed(2) + " ms";
const percent = (x) => (x < 0 ? "" : "+") + (100 * x).toFixed(1) + " %";

function add(parent, tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  parent.append(made);
  return made;
}
function picture(id, height, label) {
  const svg = add(document.getElementById(id), "svg",
    { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label });
  return svg;
}
function steps(low, high) { // about five round numbers from low to high
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + 1e-4 * step; i++) {
    found.push(+(i * step).toPrecision(12));
  }
  return found;
}
function axes(svg, box, xLimit, [yLow, yHigh], xLabel, yLabel) {
  const x = (v) => box.left + (v / xLimit) * (box.right - box.left);
  const y = (v) => box.bottom - ((v - yLow) / (yHigh - yLow)) * (box.bottom - box.top);
  for (const at of steps(yLow, yHigh)) {
    add(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y(at), y2: y(at) });
    add(svg, "text", { class: "soft", x: box.left - 6, y: y(at) + 4, "text-anchor": "end" }, at);
  }
  for (const at of steps(0, xLimit)) {
    add(svg, "text", { class: "soft", x: x(at), y: box.bottom + 16, "text-anchor": "middle" }, at);
  }
  add(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: y(0), y2: y(0) });
  add(svg, "text", { class: "soft", x: box.right, y: box.bottom + 32, "text-anchor": "end" }, xLabel);
  add(svg, "text", { class: "soft", x: 4, y: box.top - 8 }, yLabel);
  return { x, y };
}
function hover(svg, box, describe) {
  const cursor = add(svg, "line",
    { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  const hide = () => { tip.style.display = "none"; cursor.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY)
      .matrixTransform(svg.getScreenCTM().inverse());
    const share = (point.x - box.left) / (box.right - box.left);
    const text = share < 0 || share > 1 ? "" : describe(share, point);
    if (!text) return hide();
    tip.textContent = text;
    tip.style.display = "block";
    const right = event.clientX + 16 + tip.offsetWidth < innerWidth;
    tip.style.left = (right ? event.clientX + 16 : event.clientX - 16 - tip.offsetWidth) + "px";
    const below = event.clientY + 16 + tip.offsetHeight < innerHeight;
    tip.style.top = Math.max(4, below ? event.clientY + 16
      : event.clientY - 16 - tip.offsetHeight) + "px";
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", point.x);
    cursor.setAttribute("x2", point.x);
  });
}
function legend(id, entries) {
  const box = document.getElementById(id);
  for (const [label, colour] of entries) {
    const item = document.createElement("span"), mark = document.createElement("i");
    mark.style.background = colour;
    item.append(mark, label);
    box.append(item);
  }
}

function momentAt(timeline, ns) {
  let low = 0, high = timeline.start_ns.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (timeline.start_ns[middle] <= ns) low = middle; else high = middle - 1;
  }
  return low;
}
function measuredAt(timeline, ns) {
  const found = timeline.measured;
  if (!found) return [];
  const next = found.times_ns.findIndex((t) => t > ns);
  return next < 1 ? [] : [`${bytes(found.live_bytes[next - 1])} measured at ${ms(ns)} of its step`];
}
function describeMoment(timeline, index, ns) {
  const alive = timeline.stays.filter((s) => s[4] <= index && index <= s[5]);
  alive.sort((a, b) => b[3] - a[3]);
  const groups = timeline.groups
    .map((g, i) => [g, timeline.group_bytes[index][i]]).filter((g) => g[1] > 0)
    .sort((a, b) => b[1] - a[1]).map(([g, n]) => `${bytes(n)}  ${g}`);
  const largest = alive.slice(0, 6).map((s) => `${bytes(s[3])}  ${s[0]} (${s[1]})`);
  const again = timeline.again[index] ? " (again)" : "";
  return [`${timeline.operations[index]}${again}`,
    `${bytes(timeline.live_bytes[index])} alive at ${ms(ns)}, predicted`,
    ...measuredAt(timeline, ns), "",
    ...groups, "", "largest of " + alive.length, ...largest].join("\n");
}
function drawTimeline(timeline, xLimit, yRange) {
  const box = { left: LEFT, right: WIDTH - 10, top: 34, bottom: 250 };
  const svg = picture("memory", 290, timeline.title);
  add(svg, "text", { x: LEFT, y: 14, "font-weight": 600 }, timeline.title);
  const { x, y } = axes(svg, box, xLimit, yRange, timeline.measured
    ? "ms: predicted time of the colours, measured time of the line" : "predicted time, ms", "MiB");
  const count = timeline.start_ns.length;
  const at = (i) => x((i < count ? timeline.start_ns[i] : timeline.time_ns) / 1e6);
  let base = new Array(count).fill(0);
  timeline.groups.forEach((group, g) => {
    const top = base.map((b, i) => b + timeline.group_bytes[i][g] / MIB);
    let path = "";
    for (let i = 0; i < count; i++) path += `${i ? "L" : "M"}${at(i)} ${y(top[i])}H${at(i + 1)}`;
    for (let i = count - 1; i >= 0; i--) path += `L${at(i + 1)} ${y(base[i])}H${at(i)}`;
    add(svg, "path", { d: path + "Z", fill: data.colours[group], "shape-rendering": "crispEdges" });
    base = top;
  });
  const phase = x(timeline.backward_ns / 1e6);
  add(svg, "line", { class: "phase", x1: phase, x2: phase, y1: box.top, y2: box.bottom });
  add(svg, "text", { class: "soft", x: phase + 5, y: box.top + 10 }, "backward");
  if (timeline.budget_bytes !== null) {
    const level = y(timeline.budget_bytes / MIB);
    add(svg, "line", { class: "budget", x1: box.left, x2: box.right, y1: level, y2: level });
  }
  const found = timeline.measured;
  if (found) {
    const path = found.times_ns.map((t, i) =>
      `${i ? "H" : "M"}${x(t / 1e6)}${i ? "V" : " "}${y(found.live_bytes[i] / MIB)}`).join("");
    add(svg, "path", { class: "measured", d: path });
  }
  hover(svg, box, (share) => {
    const ns = share * xLimit * 1e6;
    return ns > timeline.time_ns ? "" : describeMoment(timeline, momentAt(timeline, ns), ns);
  });
}
function drawMemory() {
  const ends = data.timelines.flatMap((t) =>
    [t.time_ns, ...(t.measured ? t.measured.times_ns.slice(-1) : [])]);
  const xLimit = Math.max(...ends) / 1e6;
  const measured = data.timelines.flatMap((t) => (t.measured ? t.measured.live_bytes : []));
  const peaks = data.timelines.map((t) => t.peak_bytes);
  const most = [...peaks, ...measured].reduce((a, b) => Math.max(a, b));
  const least = measured.reduce((a, b) => Math.min(a, b), 0);
  const yRange = [1.08 * least / MIB, 1.08 * most / MIB];
  for (const timeline of data.timelines) drawTimeline(timeline, xLimit, yRange);
  const used = [...new Set(data.timelines.flatMap((t) => t.groups))];
  const lines = [["budget", "var(--budget)"]];
  if (data.timelines.some((t) => t.measured)) {
    lines.push(["measured, over its own time", "var(--text)"]);
  }
  legend("memory-legend", [...used.map((g) => [g, data.colours[g]]), ...lines]);
}

const MARKS = [
  (x, y) => `M${x - 6} ${y - 6}h12v12h-12Z`, (x, y) => `M${x} ${y - 7}l7 13h-14Z`,
  (x, y) => `M${x} ${y - 8}l8 8l-8 8l-8 -8Z`, (x, y) => `M${x} ${y + 7}l7 -13h-14Z`,
  (x, y) => `M${x - 7} ${y - 3}h14v6h-14Z`,
];
function drawCurve() {
  if (!data.series.length) return;
  const box = { left: LEFT, right: WIDTH - 10, top: 24, bottom: 340 };
  const svg = picture("curve", 380, "time over eager against peak of activation memory");
  const points = data.series.flatMap((s) => s.points.map((p) => [s.name, ...p]));
  const yLow = 1.08 * Math.min(0, ...points.map((p) => 100 * p[2]));
  const yHigh = 1.08 * Math.max(5, ...points.map((p) => 100 * p[2]));
  const xLimit = 1.04 * Math.max(...points.map((p) => p[1])) / MIB;
  const { x, y } = axes(svg, box, xLimit, [yLow, yHigh],
    "peak of activation memory, MiB", "time over eager, %");
  data.series.forEach((found, number) => {
    const colour = data.palette[number % data.palette.length];
    const at = found.points.map(([peak, over]) => [x(peak / MIB), y(100 * over)]);
    if (found.connected) {
      const d = at.map((p, i) => `${i ? "L" : "M"}${p[0]} ${p[1]}`).join("");
      add(svg, "path", { d, fill: "none", stroke: colour, "stroke-width": 2 });
      for (const p of at) add(svg, "circle", { cx: p[0], cy: p[1], r: 3, fill: colour });
    } else {
      for (const p of at) {
        add(svg, "path", { class: "mark", d: MARKS[number % 5](p[0], p[1]), fill: colour });
      }
    }
  });
  hover(svg, box, (share, pointer) => {
    const distance = (p) => Math.hypot(x(p[1] / MIB) - pointer.x, y(100 * p[2]) - pointer.y);
    const near = points.reduce((a, b) => (distance(a) <= distance(b) ? a : b));
    return distance(near) > 60 ? "" :
      [near[0], near[3], bytes(near[1]), percent(near[2]) + " time"].filter(Boolean).join("\n");
  });
  legend("curve-legend",
    data.series.map((s, i) => [s.name, data.palette[i % data.palette.length]]));
}

function drawSchedule() {
  const rows = data.rows, height = 34;
  const box = { left: 190, right: WIDTH - 90, top: 20, bottom: 20 + rows.length * height };
  const svg = picture("schedule", box.bottom + 40, "blocks over time");
  const total = data.plan_time_ns;
  const x = (ns) => box.left + (ns / total) * (box.right - box.left);
  const highest = Math.max(1, ...rows.flatMap((r) => r.alive.map((a) => a[1])));
  rows.forEach((row, i) => {
    const top = box.top + i * height;
    add(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: top, y2: top });
    const name = row.name.length > 26 ? "…" + row.name.slice(-25) : row.name;
    add(svg, "text", { x: box.left - 8, y: top + 21, "text-anchor": "end" }, name);
    add(svg, "text", { class: "soft", x: box.right + 8, y: top + 21 }, bytes(row.saved_bytes));
    let path = "";
    row.alive.forEach(([ns, live], j) => {
      const y = top + height - 1 - 15 * (live / highest);
      path += `${j ? "H" : "M"}${x(ns)}${j ? "V" : " "}${j ? y : top + height - 1 + "V" + y}`;
    });
    if (path) add(svg, "path", { d: path + `V${top + height - 1}Z`, fill: data.kept_colour });
    for (const [from, to, kind] of row.runs) {
      add(svg, "rect", { x: x(from), width: Math.max(x(to) - x(from), 0.5), y: top + 4, height: 12,
        fill: data.run_colours[kind] });
    }
  });
  const phase = x(data.plan_backward_ns);
  add(svg, "line", { class: "phase", x1: phase, x2: phase, y1: box.top, y2: box.bottom });
  for (const at of steps(0, total / 1e6)) {
    add(svg, "text", { class: "soft", x: x(at * 1e6), y: box.bottom + 16,
      "text-anchor": "middle" }, at);
  }
  add(svg, "text", { class: "soft", x: box.right, y: box.bottom + 32, "text-anchor": "end" },
    "predicted time, ms");
  add(svg, "text", { class: "soft", x: box.right + 8, y: 12 }, "kept");
  hover(svg, box, (share, point) => {
    const row = rows[Math.floor((point.y - box.top) / height)];
    if (!row || point.y < box.top) return "";
    const ns = share * total;
    const run = row.runs.find((r) => r[0] <= ns && ns <= r[1]);
    const alive = row.alive.filter((a) => a[0] <= ns).pop();
    return [row.name, run ? `${data.run_labels[run[2]]}, ${ms(run[0])} to ${ms(run[1])}`
      : "nothing of it runs here", `${bytes(alive ? alive[1] : 0)} of its activations alive`,
      `keeps ${bytes(row.saved_bytes)} for backward`].join("\n");
  });
  legend("schedule-legend", [
    ...Object.entries(data.run_labels).map(([kind, label]) => [label, data.run_colours[kind]]),
    ["activations alive (bytes)", data.kept_colour]]);
}

drawCurve();
drawMemory();
drawSchedule();
