"use strict";
/* Draws, for every result, the timeline and the memory of one rank on one linked time axis. */
const COLOURS = {
  F: "--f", B: "--b", BI: "--bi", BW: "--bw", R: "--r", UPDATE: "--update", NORM: "--norm",
  SEND_F: "--wire", RECV_F: "--wire", SEND_B: "--wire", RECV_B: "--wire",
  ALL_REDUCE: "--group", REDUCE_SCATTER: "--group", ALL_GATHER: "--group", ALL_TO_ALL: "--group",
};
const WORDS = {
  F: "forward", B: "backward", BI: "backward for inputs", BW: "backward for weights", R: "recompute",
  UPDATE: "optimizer update", NORM: "gradient norm", SEND_F: "send activation", RECV_F: "receive activation",
  SEND_B: "send gradient", RECV_B: "receive gradient", ALL_REDUCE: "all-reduce", REDUCE_SCATTER: "reduce-scatter",
  ALL_GATHER: "all-gather", ALL_TO_ALL: "all-to-all",
};
const CLASS_COLOURS = ["--f", "--bi", "--update", "--b", "--bw", "--group", "--r"];
const LEFT = 92, TOP = 6, COMPUTE_ROW = 22, WIRE_ROW = 9, GAP = 7, AXIS = 24;
const tip = document.getElementById("tip");

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function seconds(ticks, tickNs) {
  const s = ticks * tickNs / 1e9, a = Math.abs(s);
  if (a < tickNs / 2e9) return "0";
  if (a >= 1) return s.toFixed(3) + " s";
  if (a >= 1e-3) return (s * 1e3).toFixed(2) + " ms";
  return (s * 1e6).toFixed(1) + " us";
}

function gib(bytes) {
  if (bytes >= 2 ** 30 / 10) return (bytes / 2 ** 30).toFixed(2) + " GiB";
  if (bytes >= 2 ** 20 / 10) return (bytes / 2 ** 20).toFixed(2) + " MiB";
  return (bytes / 2 ** 10).toFixed(2) + " KiB";
}

/* First position whose value is greater than x, in a rising list. */
function after(list, x, from, to) {
  while (from < to) { const mid = (from + to) >> 1; if (list[mid] <= x) from = mid + 1; else to = mid; }
  return from;
}

/* Round steps 1, 2, 5 x 10^k so that about `count` fit. */
function niceStep(length, count) {
  const raw = length / count, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map(m => m * power).find(step => step >= raw);
}

class Drawing {
  constructor(section, data, longest) {
    this.data = data; this.section = section; this.longest = longest;
    this.gantt = section.querySelector(".gantt"); this.memory = section.querySelector(".memory");
    this.select = section.querySelector(".memory-rank");
    data.ranks.forEach(rank => {
      rank.first = rank.streams.map((_, s) => after(rank.stream, s - 0.5, 0, rank.stream.length));
      rank.first.push(rank.stream.length);
      rank.totals = rank.memory.bytes.map(row => row.reduce((a, b) => a + b, 0));
      rank.peak = rank.totals.reduce((a, b) => Math.max(a, b), 0);
    });
    this.fillSelect(); this.legends(); this.oneStep(); this.listen(section);
  }
  fillSelect() {
    const worst = this.data.ranks.reduce((best, rank, i, all) => rank.peak > all[best].peak ? i : best, 0);
    this.data.ranks.forEach((rank, i) => this.select.add(new Option(this.label(rank) + (i === worst ? " (highest peak)" : ""), i)));
    this.select.value = worst;
  }
  label(rank) { return this.data.source === "measured" ? "rank " + rank.rank : "pp rank " + rank.pipeline_rank; }
  legends() {
    const used = new Set(this.data.ranks.flatMap(rank => rank.kind_of));
    const words = new Map();
    [...used].sort((a, b) => a - b).map(kind => this.data.kinds[kind]).forEach(kind => {
      const name = COLOURS[kind];
      words.set(name, [...(words.get(name) || []), WORDS[kind] || kind]);
    });
    this.section.querySelector(".kinds").innerHTML = [...words].map(([name, list]) => `<span><i style="background:var(${name})"></i>${list.join(", ")}</span>`).join("");
    const classes = this.data.classes.map((name, i) => this.data.ranks.some(r => r.memory.bytes.some(row => row[i])) ? `<span><i style="background:var(${CLASS_COLOURS[i]})"></i>${name}</span>` : "");
    this.section.querySelector(".classes").innerHTML = classes.join("");
  }
  /* Time since the begin of the last step; negative in steps before it. */
  inStep(at) { return seconds(at - this.data.window, this.data.tick_ns); }
  oneStep() { this.t0 = this.data.window; this.t1 = this.data.window + this.longest / (this.data.tick_ns / 1e9); this.draw(); }
  everything() { this.t0 = this.data.begin; this.t1 = this.data.end; this.draw(); }
  listen(section) {
    section.querySelector(".zoom-step").onclick = () => this.oneStep();
    section.querySelector(".zoom-all").onclick = () => this.everything();
    section.querySelector(".communication").onchange = () => this.draw();
    this.select.onchange = () => this.draw();
    for (const canvas of [this.gantt, this.memory]) {
      canvas.addEventListener("wheel", event => this.wheel(event), { passive: false });
      canvas.addEventListener("pointerdown", event => { this.drag = event.clientX; canvas.setPointerCapture(event.pointerId); });
      canvas.addEventListener("pointerup", () => { this.drag = undefined; });
      canvas.addEventListener("pointermove", event => this.move(event, canvas));
      canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
      canvas.addEventListener("keydown", event => this.key(event));
    }
  }
  key(event) {
    const length = this.t1 - this.t0;
    if (event.key === "ArrowLeft") this.shift(-length / 10);
    else if (event.key === "ArrowRight") this.shift(length / 10);
    else if (event.key === "+") this.zoom(0.7, (this.t0 + this.t1) / 2);
    else if (event.key === "-") this.zoom(1 / 0.7, (this.t0 + this.t1) / 2);
    else return;
    event.preventDefault();
  }
  wheel(event) {
    event.preventDefault();
    this.zoom(Math.exp(Math.sign(event.deltaY) * 0.22), this.timeAt(event.offsetX));
  }
  zoom(factor, centre) {
    const length = Math.min(Math.max((this.t1 - this.t0) * factor, 20), 4 * (this.data.end - this.data.begin));
    const share = (centre - this.t0) / (this.t1 - this.t0);
    this.t0 = centre - share * length; this.t1 = this.t0 + length; this.draw();
  }
  shift(by) { this.t0 += by; this.t1 += by; this.draw(); }
  timeAt(x) { return this.t0 + (x - LEFT) / (this.gantt.clientWidth - LEFT) * (this.t1 - this.t0); }
  move(event, canvas) {
    if (this.drag !== undefined) {
      this.shift((this.drag - event.clientX) / (canvas.clientWidth - LEFT) * (this.t1 - this.t0));
      this.drag = event.clientX;
    }
    const text = canvas === this.gantt ? this.spanText(event) : this.memoryText(event);
    tip.hidden = !text; tip.textContent = text || "";
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
  }
  spanText(event) {
    const row = this.rows.find(r => event.offsetY >= r.y && event.offsetY < r.y + r.height);
    if (!row) return "";
    const { rank, stream } = row, time = this.timeAt(event.offsetX);
    const from = rank.first[stream], i = after(rank.start, time, from, rank.first[stream + 1]) - 1;
    const where = `${this.label(rank)}, stream ${rank.streams[stream]}`;
    if (i < from || time > rank.start[i] + rank.length[i]) return `${where}\nidle at ${this.inStep(time)}`;
    const task = rank.task[i], kind = this.data.kinds[rank.kind_of[task]];
    return `${rank.codes[task]}: ${WORDS[kind] || kind}\n${where}, step ${rank.step[i]}\nstarts ${this.inStep(rank.start[i])}, takes ${seconds(rank.length[i], this.data.tick_ns)}`;
  }
  memoryText(event) {
    const rank = this.data.ranks[+this.select.value], time = this.timeAt(event.offsetX);
    const i = after(rank.memory.at, time, 0, rank.memory.at.length) - 1;
    if (i < 0) return "";
    const rows = rank.memory.bytes[i].map((bytes, c) => bytes ? `\n${this.data.classes[c]} ${gib(bytes)}` : "");
    return `${this.label(rank)} at ${this.inStep(time)}: ${gib(rank.totals[i])}${rows.join("")}`;
  }
  draw() { this.drawGantt(); this.drawMemory(); }
  canvas(element, height) {
    const ratio = devicePixelRatio || 1, width = element.clientWidth;
    element.style.height = height + "px"; element.width = width * ratio; element.height = height * ratio;
    const pen = element.getContext("2d");
    pen.scale(ratio, ratio); pen.clearRect(0, 0, width, height); pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    return pen;
  }
  drawGantt() {
    const wires = this.section.querySelector(".communication").checked;
    let y = TOP; this.rows = [];
    for (const rank of this.data.ranks) {
      rank.streams.forEach((_, stream) => {
        if ((stream && !wires) || rank.first[stream] === rank.first[stream + 1]) return;
        const height = stream ? WIRE_ROW : COMPUTE_ROW;
        this.rows.push({ rank, stream, y, height }); y += height + (stream ? 1 : 2);
      });
      y += GAP;
    }
    const pen = this.canvas(this.gantt, y + AXIS), width = this.gantt.clientWidth;
    const scale = (width - LEFT) / (this.t1 - this.t0), palette = {};
    for (const [kind, name] of Object.entries(COLOURS)) palette[kind] = colour(name);
    const x = time => LEFT + (time - this.t0) * scale;
    for (const row of this.rows) {
      if (!row.stream) { pen.fillStyle = colour("--ink"); pen.textAlign = "left"; pen.fillText(this.label(row.rank), 0, row.y + row.height / 2); }
      const left = Math.max(x(this.data.begin), LEFT), right = Math.min(x(this.data.end), width);
      pen.fillStyle = colour("--idle"); if (right > left) pen.fillRect(left, row.y, right - left, row.height);
      this.drawRow(pen, row, x, palette, width);
    }
    this.drawSteps(pen, x, y, width); this.drawAxis(pen, x, y, width);
  }
  drawRow(pen, row, x, palette, width) {
    const { rank, stream } = row, from = rank.first[stream], to = rank.first[stream + 1];
    let painted = -1;
    pen.textAlign = "center";
    for (let i = Math.max(from, after(rank.start, this.t0, from, to) - 1); i < to && rank.start[i] < this.t1; i++) {
      const left = Math.max(x(rank.start[i]), LEFT), right = Math.min(x(rank.start[i] + rank.length[i]), width);
      if (right <= LEFT || (right - left < 0.6 && right <= painted)) continue;
      const task = rank.task[i], wide = right - left;
      pen.fillStyle = palette[this.data.kinds[rank.kind_of[task]]] || palette.SEND_F;
      pen.fillRect(left, row.y, Math.max(wide - (wide > 4 ? 1 : 0), 0.8), row.height);
      painted = Math.max(left + 0.8, right);
      if (!stream && wide > 8 * rank.codes[task].length) { pen.fillStyle = "#fff"; pen.fillText(rank.codes[task], (left + right) / 2, row.y + row.height / 2 + 0.5); }
    }
  }
  drawSteps(pen, x, bottom, width) {
    pen.strokeStyle = colour("--soft"); pen.setLineDash([3, 3]);
    for (const end of this.data.step_ends) {
      const at = x(end);
      if (at < LEFT || at > width) continue;
      pen.beginPath(); pen.moveTo(at, 0); pen.lineTo(at, bottom); pen.stroke();
    }
    pen.setLineDash([]);
  }
  drawAxis(pen, x, y, width) {
    const step = niceStep(this.t1 - this.t0, 8);
    pen.fillStyle = colour("--soft"); pen.strokeStyle = colour("--line"); pen.textAlign = "center";
    const zero = this.data.window;
    for (let at = zero + Math.ceil((this.t0 - zero) / step) * step; at <= this.t1; at += step) {
      const px = x(at);
      if (px < LEFT) continue;
      pen.beginPath(); pen.moveTo(px, y - 3); pen.lineTo(px, y + 2); pen.stroke();
      pen.fillText(this.inStep(at), Math.min(px, width - 26), y + 12);
    }
  }
  drawMemory() {
    const height = 210, bottom = height - AXIS, rank = this.data.ranks[+this.select.value];
    const pen = this.canvas(this.memory, height), width = this.memory.clientWidth;
    const limit = this.data.limit_bytes || 0;
    const top = limit && rank.peak > limit / 4 ? Math.max(rank.peak * 1.08, limit * 1.04) : rank.peak * 1.15 || 1;
    const x = time => LEFT + (time - this.t0) / (this.t1 - this.t0) * (width - LEFT), y = bytes => bottom - bytes / top * (bottom - TOP);
    this.drawMemoryScale(pen, y, top, width);
    pen.save(); pen.beginPath(); pen.rect(LEFT, 0, width - LEFT, bottom); pen.clip();
    const at = rank.memory.at, first = Math.max(after(at, this.t0, 0, at.length) - 1, 0), last = Math.min(after(at, this.t1, 0, at.length) + 1, at.length);
    const floor = new Array(last - first).fill(0);
    this.data.classes.forEach((_, c) => {
      if (!rank.memory.bytes.some(row => row[c])) return;
      pen.fillStyle = colour(CLASS_COLOURS[c]); pen.beginPath();
      const end = i => x(i + 1 < at.length ? at[i + 1] : this.data.end);
      const roof = floor.map((value, k) => value + rank.memory.bytes[first + k][c]);
      for (let k = 0; k < roof.length; k++) { pen.lineTo(x(at[first + k]), y(roof[k])); pen.lineTo(end(first + k), y(roof[k])); }
      for (let k = roof.length - 1; k >= 0; k--) { pen.lineTo(end(first + k), y(floor[k])); pen.lineTo(x(at[first + k]), y(floor[k])); }
      pen.fill(); roof.forEach((value, k) => { floor[k] = value; });
    });
    if (limit && limit <= top) {
      pen.strokeStyle = colour("--bad"); pen.setLineDash([6, 4]); pen.beginPath(); pen.moveTo(LEFT, y(limit)); pen.lineTo(width, y(limit)); pen.stroke(); pen.setLineDash([]);
      const label = "left for tensors: " + gib(limit), below = y(limit) + 9;
      pen.fillStyle = colour("--bad"); pen.strokeStyle = colour("--card"); pen.lineWidth = 4; pen.textAlign = "right";
      pen.strokeText(label, width - 6, below); pen.fillText(label, width - 6, below); pen.lineWidth = 1;
    }
    pen.restore(); this.drawAxis(pen, x, bottom, width);
  }
  drawMemoryScale(pen, y, top, width) {
    const [unit, name] = [[2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"]].find(([size], i) => i === 2 || top >= size / 10), step = niceStep(top / unit, 5) * unit;
    pen.textAlign = "right";
    for (let bytes = 0; bytes <= top; bytes += step) {
      pen.strokeStyle = colour("--line"); pen.beginPath(); pen.moveTo(LEFT, y(bytes)); pen.lineTo(width, y(bytes)); pen.stroke();
      pen.fillStyle = colour("--soft"); pen.fillText(+(bytes / unit).toPrecision(3) + name, LEFT - 8, y(bytes));
    }
  }
}

const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
const longest = Math.max(...RESULTS.map(data => (data.end - data.window) * data.tick_ns / 1e9));
const drawings = [...document.querySelectorAll(".drawing")].map(section => new Drawing(section, RESULTS[+section.dataset.card], longest));
const redraw = () => drawings.forEach(drawing => drawing.draw());
document.getElementById("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; redraw(); };
addEventListener("resize", redraw);
addEventListener("beforeprint", () => { root.dataset.theme = "light"; redraw(); });
