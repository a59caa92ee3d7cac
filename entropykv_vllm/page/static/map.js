// SPDX-License-Identifier: Apache-2.0
// The map: a band of rows for each tier's layers, time from left to right, pages as heights.

export const SECONDS = 600;
const SPANS = [120, 300, SECONDS];
const LEFT = 98, RIGHT = 8, GAP = 10, FOOT = 22;

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Size a canvas for the screen; its context, in CSS pixels. */
export function prepare(canvas, height) {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = "12px system-ui, sans-serif";
  return { pen, width, height };
}

function hatch(pen) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const brush = tile.getContext("2d");
  brush.fillStyle = color("freed");
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = color("hatch");
  for (const x of [-6, 0, 6]) {
    brush.moveTo(x, 6);
    brush.lineTo(x + 6, 0);
  }
  brush.stroke();
  return pen.createPattern(tile, "repeat");
}

/** "0-3, 7" of sorted numbers. */
export function ranges(layers) {
  const parts = [];
  for (const layer of layers) {
    const last = parts.at(-1);
    if (last && last[1] === layer - 1) last[1] = layer;
    else parts.push([layer, layer]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
}

function shortened(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  while (text && pen.measureText(`${text}…`).width > room) text = text.slice(0, -1);
  return `${text}…`;
}

/** Heights of the tiers' bands: the more layers, the taller. */
function bands(tiers) {
  const all = tiers.reduce((sum, tier) => sum + tier.layers.length, 0) || 1;
  const room = Math.max(150, 62 * tiers.length);
  let top = 4;
  return tiers.map((tier) => {
    const height = Math.max(46, Math.round((room * tier.layers.length) / all));
    const band = { tier, top, height };
    top += height + GAP;
    return band;
  });
}

/** The seconds that the map shows: no more than there is something to say about. */
function span(samples, now) {
  const age = samples.length ? now - samples[0].second : 0;
  return SPANS.find((seconds) => age < seconds) || SECONDS;
}

/** The samples as columns: what was so in each of the last seconds, the last known if none came. */
function columns(samples, now, seconds) {
  const found = new Map(samples.map((sample) => [sample.second, sample]));
  const line = [];
  let last = samples.findLast((sample) => sample.second <= now - seconds) || null;
  for (let second = now - seconds + 1; second <= now; second++) {
    last = found.get(second) || last;
    line.push(last);
  }
  return line;
}

const total = (counts) => counts.hot + counts.cold + counts.holes;

export class PageMap {
  constructor(canvas, reading) {
    Object.assign(this, { canvas, reading, bands: [], line: [], at: null });
    const move = (event) => this.point(event.offsetX, event.offsetY);
    canvas.addEventListener("pointermove", move);
    canvas.addEventListener("pointerdown", move);
    canvas.addEventListener("pointerleave", () => this.point(null));
  }

  draw(tiers, samples, now) {
    this.bands = bands(tiers);
    this.now = now;
    this.line = columns(samples, now, span(samples, now));
    const last = this.bands.at(-1);
    const { pen, width, height } = prepare(this.canvas, last ? last.top + last.height + FOOT : 60);
    this.width = width;
    this.step = (width - LEFT - RIGHT) / this.line.length;
    pen.clearRect(0, 0, width, height);
    const freed = hatch(pen);
    for (const band of this.bands) this.drawBand(pen, band, freed);
    this.drawTime(pen, height);
    if (this.at) this.drawPointer(pen, height);
    this.read();
  }

  drawBand(pen, { tier, top, height }, freed) {
    const counted = this.line.map((sample) => sample?.tiers[tier.name] || null);
    const most = Math.max(...counted.map((counts) => (counts ? total(counts) : 0)));
    pen.fillStyle = color("panel");
    pen.fillRect(LEFT, top, this.width - LEFT - RIGHT, height);
    const fills = [["hot", color("hot")], ["cold", color(`cold${tier.bits}`)], ["holes", freed]];
    counted.forEach((counts, i) => {
      if (!counts || !most) return;
      let base = top + height;
      for (const [kind, fill] of fills) {
        const tall = (counts[kind] / most) * height;
        pen.fillStyle = fill;
        pen.fillRect(LEFT + i * this.step, base - tall, this.step + 0.6, tall);
        base -= tall;
      }
    });
    this.label(pen, tier, top, height, most);
  }

  label(pen, tier, top, height, most) {
    pen.textBaseline = "top";
    pen.fillStyle = color("ink");
    const word = tier.layers.length === 1 ? "layer" : "layers";
    pen.fillText(shortened(pen, `${word} ${ranges(tier.layers)}`, LEFT - 8), 0, top + 1);
    pen.fillStyle = color("soft");
    pen.fillText(shortened(pen, tier.name, LEFT - 8), 0, top + 16);
    if (most) pen.fillText(shortened(pen, `to ${most.toLocaleString()} pages`, LEFT - 8), 0, top + 31);
  }

  drawTime(pen, height) {
    pen.fillStyle = color("soft");
    pen.textBaseline = "alphabetic";
    const parts = this.width < 600 ? 2 : 4, seconds = this.line.length;
    for (let part = 0; part <= parts; part++) {
      const ago = Math.round((seconds * (parts - part)) / parts);
      const text = ago % 60 ? `${ago} s ago` : `${ago / 60} min ago`;
      pen.textAlign = part === 0 ? "left" : ago === 0 ? "right" : "center";
      pen.fillText(ago ? text : "now", LEFT + (seconds - ago) * this.step, height - 6);
    }
    pen.textAlign = "left";
  }

  drawPointer(pen, height) {
    const x = LEFT + (this.at.column + 0.5) * this.step;
    pen.fillStyle = color("ink");
    pen.fillRect(x - 0.5, 0, 1, height - FOOT);
  }

  point(x, y) {
    const column = x === null ? -1 : Math.floor((x - LEFT) / this.step);
    const band = this.bands.find(({ top, height }) => y >= top - GAP / 2 && y < top + height + GAP / 2);
    this.at = column >= 0 && column < this.line.length && band ? { column, name: band.tier.name } : null;
    this.redraw?.();
  }

  read() {
    if (!this.at) {
      this.reading.textContent = "Point at the map to read its numbers. Its heights are pages.";
      return;
    }
    const counts = this.line[this.at.column]?.tiers[this.at.name];
    const ago = this.line.length - 1 - this.at.column;
    const when = new Date((this.now - ago) * 1000).toLocaleTimeString();
    this.reading.textContent = counts
      ? `${when}, ${this.at.name}: ${counts.hot} hot, ${counts.cold} cold, ${counts.holes} freed of ` +
        `${total(counts)} pages`
      : `${when}, ${this.at.name}: nothing was running`;
  }
}
