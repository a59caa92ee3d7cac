// SPDX-License-Identifier: Apache-2.0
// What is kept of one request: a strip for each tier, and its text, or blank cells in its place.
import { color, prepare, ranges } from "./map.js";

const LEFT = 98, ROW = 22, GAP = 6, PER_PAGE = 4096, MOST_CELLS = 32768;

const bytes = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
const byId = (id) => document.getElementById(id);

function mixer() {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const of = (name) => {
    probe.fillStyle = color(name);
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data;
  };
  const from = of("freed"), to = of("ink");
  const mixed = (share, i) => Math.round(from[i] + (to[i] - from[i]) * share);
  return (share) => `rgb(${mixed(share, 0)} ${mixed(share, 1)} ${mixed(share, 2)})`;
}

export class Story {
  constructor(redraw) {
    Object.assign(this, { id: null, redraw, tier: 0, page: null, tiers: [], pointed: null });
    byId("text-before").addEventListener("click", () => this.turn(-1));
    byId("text-after").addEventListener("click", () => this.turn(1));
    byId("text").addEventListener("pointerover", (event) => this.point(event.target.dataset?.at));
    byId("cells").addEventListener("pointermove", (event) => this.point(this.cellAt(event)));
    byId("strips").addEventListener("pointermove", (event) => this.pointStrip(event));
    byId("strips").addEventListener("pointerdown", (event) => this.pointStrip(event));
  }

  choose(id) {
    Object.assign(this, { id, serial: null, page: null, tier: 0, pointed: null });
    this.forget();
    byId("story").hidden = id === null;
    byId("story-id").textContent = id ?? "";
    byId("text").replaceChildren();
    byId("story-tiers").replaceChildren();
  }

  forget() {
    Object.assign(this, { end: 0, ended: false, held: new Map(), pieces: [], drawn: "", prompt: 0 });
  }

  /** Take in a message's story; what was told before is not told again. */
  hear(story) {
    if (story.id !== this.id) return;
    if (story.serial !== undefined && story.serial !== this.serial) {
      this.forget();
      this.serial = story.serial;
    }
    this.ended = story.ended;
    if (story.tiers === undefined) return;
    this.end = story.end;
    for (const [name, told] of Object.entries(story.tiers)) {
      const held = this.held.get(name) || {};
      if (told.bands !== undefined) {
        held.bands = told.bands || [];
        held.shares = told.shares ? bytes(told.shares) : null;
        held.version = (held.version || 0) + 1;
      }
      this.held.set(name, Object.assign(held, { hot: told.hot, tokens: told.tokens }));
    }
    if (story.text) {
      this.pieces.length = story.text.first;
      this.pieces.push(...story.text.pieces);
    }
  }

  /** The share of a tier's layers and heads that hold a token. */
  share(held, token) {
    if (!held) return 0;
    if (token >= held.hot) return 1;
    if (held.shares) return (held.shares[token] ?? 0) / 255;
    const band = held.bands?.find(([first, end]) => token >= first && token < end);
    return band ? Math.min(1, band[2]) : 0;
  }

  draw(tiers, requests, hasText) {
    if (this.id === null) return;
    this.tiers = tiers;
    this.hasText = hasText;
    const row = requests.find((request) => request.id === this.id);
    if (row) this.prompt = row.prompt;
    this.drawState();
    this.drawChoices();
    this.drawStrips();
    this.drawTokens();
    this.read();
  }

  drawState() {
    const known = this.end > 0;
    const what = `${this.end.toLocaleString()} tokens`;
    byId("story-state").textContent = !known
      ? this.ended ? "No request of this name is running." : "Asking the engine …"
      : this.ended
        ? `It has ended. This is how it was last seen, with ${what}.`
        : `${what} so far.`;
    byId("story-note").textContent = !known || this.hasText
      ? this.hasText && known && !this.pieces.length ? "Its text is not known to this server process." : ""
      : "The cells are its tokens, in order, and have no text: that is shown only by a server started with " +
        "--kv-eviction-ui-text. Without it a cell has the share of its whole stretch of text.";
  }

  drawChoices() {
    const box = byId("story-tiers");
    if (box.children.length !== this.tiers.length) {
      box.replaceChildren(...this.tiers.map((tier, i) => {
        const button = document.createElement("button");
        Object.assign(button, { type: "button", textContent: `layers ${ranges(tier.layers)}` });
        button.setAttribute("role", "radio");
        button.addEventListener("click", () => {
          this.tier = i;
          this.redraw();
        });
        return button;
      }));
    }
    [...box.children].forEach((button, i) => button.setAttribute("aria-checked", `${i === this.tier}`));
  }

  drawStrips() {
    const height = this.tiers.length * (ROW + GAP) + 18;
    const { pen, width } = prepare(byId("strips"), height);
    const mix = mixer(), room = width - LEFT;
    pen.textBaseline = "middle";
    this.tiers.forEach((tier, i) => {
      const top = i * (ROW + GAP), held = this.held.get(tier.name);
      pen.fillStyle = color("ink");
      pen.fillText(ranges(tier.layers).slice(0, 14), 0, top + ROW / 2);
      for (let x = 0; x < room && this.end; x++) {
        pen.fillStyle = mix(this.average(held, x, room));
        pen.fillRect(LEFT + x, top, 1, ROW);
      }
      pen.strokeStyle = i === this.tier ? color("hot") : color("line");
      pen.strokeRect(LEFT + 0.5, top + 0.5, room - 1, ROW - 1);
    });
    pen.fillStyle = color("soft");
    pen.textBaseline = "alphabetic";
    pen.fillText("token 0", LEFT, height - 4);
    pen.textAlign = "right";
    pen.fillText(`${this.end.toLocaleString()}`, width, height - 4);
    pen.textAlign = "left";
  }

  average(held, x, room) {
    const first = Math.floor((x * this.end) / room);
    const end = Math.max(first + 1, Math.floor(((x + 1) * this.end) / room));
    let sum = 0;
    for (let token = first; token < end; token++) sum += this.share(held, token);
    return sum / (end - first);
  }

  drawTokens() {
    const shown = this.hasText && this.pieces.length > 0;
    byId("text").hidden = byId("text-pages").hidden = !shown;
    byId("cells").hidden = shown || this.hasText || !this.end;
    if (shown) this.drawText();
    else if (!byId("cells").hidden) this.drawCells();
  }

  drawCells() {
    const count = Math.min(this.end, MOST_CELLS), size = count > 8192 ? 5 : count > 2048 ? 8 : 11;
    const canvas = byId("cells");
    this.across = Math.max(1, Math.floor(canvas.clientWidth / size));
    this.size = size;
    const { pen } = prepare(canvas, Math.ceil(count / this.across) * size);
    const mix = mixer(), held = this.held.get(this.tiers[this.tier]?.name);
    for (let token = 0; token < count; token++) {
      pen.fillStyle = mix(this.share(held, token));
      const x = (token % this.across) * size, y = Math.floor(token / this.across) * size;
      pen.fillRect(x, y, size - 1, size - 1);
    }
  }

  get lastPage() {
    return Math.max(0, Math.ceil(this.pieces.length / PER_PAGE) - 1);
  }

  turn(by) {
    const page = Math.max(0, Math.min(this.lastPage, (this.page ?? 0) + by));
    this.page = page;
    this.redraw();
  }

  /** A span for each token; they are made once and coloured anew when something changed. */
  drawText() {
    const page = this.page ?? 0, first = page * PER_PAGE;
    const end = Math.min(this.pieces.length, first + PER_PAGE), box = byId("text");
    const held = this.held.get(this.tiers[this.tier]?.name);
    if (this.drawn !== `${this.serial}/${first}`) box.replaceChildren();
    this.drawn = `${this.serial}/${first}`;
    for (let token = first + box.children.length; token < end; token++) {
      const span = document.createElement("span");
      span.textContent = this.pieces[token];
      span.dataset.at = token;
      box.append(span);
    }
    [...box.children].forEach((span, i) => {
      const token = first + i, answer = this.prompt && token >= this.prompt ? " answer" : "";
      const name = `k${Math.round(this.share(held, token) * 8)}${answer}`;
      if (span.className !== name) span.className = name;
    });
    byId("text-range").textContent = `tokens ${first} to ${end - 1} of ${this.pieces.length}`;
    byId("text-before").disabled = page === 0;
    byId("text-after").disabled = page >= this.lastPage;
  }

  cellAt(event) {
    const column = Math.floor(event.offsetX / this.size);
    return column < this.across ? Math.floor(event.offsetY / this.size) * this.across + column : null;
  }

  pointStrip(event) {
    const room = event.target.clientWidth - LEFT, x = event.offsetX - LEFT;
    const tier = Math.floor(event.offsetY / (ROW + GAP));
    if (event.type === "pointerdown" && tier < this.tiers.length) {
      this.tier = tier;
      this.redraw();
    }
    this.point(x >= 0 ? Math.floor((x * this.end) / room) : null, tier);
  }

  point(token, tier = this.tier) {
    this.pointed = token === undefined || token === null ? null : { token: Number(token), tier };
    this.read();
  }

  read() {
    const line = byId("story-reading"), at = this.pointed;
    const tier = this.tiers[at?.tier ?? this.tier], held = this.held.get(tier?.name);
    if (!tier || !held) {
      line.textContent = "";
      return;
    }
    const layers = `layers ${ranges(tier.layers)}`;
    if (!at || at.token >= this.end) {
      line.textContent = `In ${layers} each head holds ${Math.round(held.tokens).toLocaleString()} of ` +
        `${this.end.toLocaleString()} tokens.`;
      return;
    }
    const share = Math.round(this.share(held, at.token) * 100), piece = this.pieces[at.token];
    const what = at.token >= held.hot ? "hot, so held by all" : `held by ${share} %`;
    line.textContent = `Token ${at.token}${piece ? ` “${piece.trim()}”` : ""}: ${what} of the heads of ${layers}.`;
  }
}
