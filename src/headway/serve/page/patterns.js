// A pattern without a model: typed or dragged, drawn and costed by the library's own code.
import { post } from "/page/api.js";
import { fact, h, percent, say, slider, tell } from "/page/dom.js";
import { t } from "/page/texts.js";

const PRESETS = ["Causal()", "Window.last(8)", "Window.last(6) | Causal() & Sink(3)", "Window.last(5, step=3)", "Window.around(4) | Global()", "PerHead(Window.last(4), Causal())"];
const state = { text: "Window.last(8) | Causal() & Sink(2)", tokens: 32, globals: [], before: 7, sinks: 2, step: 1, both: false };
let asked = 0;

export function patterns() {
  const field = h("input", { id: "pattern", value: state.text, spellcheck: false, autocomplete: "off", oninput: () => { state.text = field.value; soon(); } });
  field.setAttribute("aria-label", t("pattern"));
  const problem = h("p.problem", { role: "status" });
  const pictures = h("div.pictures"), facts = h("div.facts-of");
  const built = (change) => (value) => { Object.assign(state, change(value)); build(); };
  const controls = {
    before: slider(t("window"), state.before + 1, [1, state.tokens], built((value) => ({ before: value - 1 }))),
    step: slider(t("dilation"), state.step, [1, 8], built((value) => ({ step: value }))),
    sinks: slider(t("sinks"), state.sinks, [0, state.tokens], built((value) => ({ sinks: value }))),
    tokens: slider(t("size"), state.tokens, [8, 96], (value) => {
      state.tokens = value;
      state.globals = state.globals.filter((index) => index < value);
      soon();
    }),
  };
  const both = h("input", { type: "checkbox", checked: state.both, onchange: () => { state.both = both.checked; build(); } });
  const marked = h("span");
  ask();
  return [h("section.declare", {},
    h("h1", {}, t("patternTitle")), h("p", {}, t("patternIntro")), field, problem,
    h("p.presets", {}, h("small", {}, t("presets")), ...PRESETS.map((text) => h("button.plain", { onclick: () => { state.text = field.value = text; ask(); } }, h("code", {}, text)))),
    h("div.controls", {}, ...Object.values(controls), h("label.slider", {}, h("span", {}, t("twoSided")), both), h("p.slider", {}, h("span", {}, t("globals")), marked))),
  h("section.drawn", {}, pictures, facts)];

  // The pattern that the controls spell.
  function build() {
    const { before, sinks, step, both, globals } = state, steps = step > 1 ? `, step=${step}` : "";
    const parts = [both ? `Window.around(${before}${steps})` : `Window.last(${before + 1}${steps})`];
    if (sinks) parts.push(both ? `Sink(${sinks})` : `Causal() & Sink(${sinks})`);
    if (globals.length) parts.push(both ? "Global()" : "Causal() & GlobalKeys()");
    state.text = field.value = parts.join(" | ");
    controls.before.set(before + 1);
    controls.sinks.set(sinks);
    ask();
  }

  function soon() {
    clearTimeout(state.timer);
    state.timer = setTimeout(ask, 150);
  }

  async function ask() {
    const number = ++asked;
    try {
      const told = await post("/v1/pattern", { pattern: state.text, tokens: state.tokens, globals: state.globals, layers: 4 });
      if (number !== asked) return;
      problem.textContent = "";
      say(null);
      draw(told);
    } catch (error) {
      if (number !== asked) return;
      if (error.status === 400) problem.textContent = error.message;
      else tell(error);
    }
  }

  function draw(told) {
    marked.textContent = state.globals.join(", ") || t("noGlobals");
    controls.before.set(state.before + 1, state.tokens);
    controls.sinks.set(state.sinks, state.tokens);
    // A picture that is being dragged in stays the one that it is.
    while (pictures.children.length > told.heads) pictures.lastChild.remove();
    while (pictures.children.length < told.heads) pictures.append(h("figure", {}, picture(), h("figcaption")));
    for (const [head, figure] of [...pictures.children].entries()) {
      const [canvas, caption] = figure.children;
      canvas.setAttribute("aria-label", `${told.pattern}: ${t("pairsOf", told.pairs, told.heads * told.tokens ** 2)}`);
      caption.textContent = told.heads > 1 ? t("headNumber", head) : "";
      canvas.cells = told.cells[head];
      canvas.paint();
    }
    const { before, after } = told.reach, kept = told.retention;
    facts.replaceChildren(
      h("div.legend", {}, ...["seen", "kept", "released", "later"].map((fate) => h(`span.${fate}`, {}, t(`fates.${fate}`)))),
      h("dl.facts", {},
        fact(t("pattern"), h("code", {}, told.pattern)),
        fact(t("pairs"), t("pairsOf", told.pairs, told.heads * told.tokens ** 2), percent(told.density)),
        fact(t("reach"), t("reachOf", before ?? t("all"), after ?? t("all"))),
        fact(t("cache"), told.causal ? (kept.reach === null ? t("retentionAll") : t("retention", kept.reach, kept.sinks)) : told.cache.why),
        fact(t("costs"), h("ul", {}, ...Object.entries(told.pairs_at).map(([n, pairs]) => h("li", { "--w": (pairs / n ** 2 / told.heads).toFixed(4) }, t("costOf", n, percent(pairs / n ** 2 / told.heads)))))),
        fact(t("field"), h("ul", {}, ...told.receptive_field.map((row) => h("li", {}, t("fieldOf", row.layers, row.tokens, row.first)))))));
  }

  // Queries down, keys to the right; above it a mark for each key.
  function picture() {
    const canvas = h("canvas.pattern", { role: "img" }), colours = {}, room = 12;
    new ResizeObserver(() => canvas.paint()).observe(canvas);
    canvas.paint = () => {
      const cells = canvas.cells, count = cells.length;
      const css = getComputedStyle(document.documentElement), ratio = devicePixelRatio;
      for (const name of ["heat", "kept", "released", "line", "ink"]) colours[name] = css.getPropertyValue(`--${name}`).trim();
      const side = canvas.clientWidth, cell = (side - room) / count, pen = canvas.getContext("2d"), gap = cell > 6 ? 1 : cell > 3 ? 0.5 : 0;
      Object.assign(canvas, { width: side * ratio, height: side * ratio });
      pen.scale(ratio, ratio);
      const fills = { "#": colours.heat, "+": colours.kept, ".": colours.released };
      for (let q = 0; q < count; q++) {
        for (let k = 0; k < count; k++) {
          const fill = fills[cells[q][k]];
          if (!fill) continue;
          pen.fillStyle = fill;
          pen.fillRect(room + k * cell, room + q * cell, cell - gap, cell - gap);
        }
      }
      for (let k = 0; k < count; k++) {
        pen.fillStyle = state.globals.includes(k) ? colours.ink : colours.line;
        pen.fillRect(room + k * cell, 3, cell - Math.max(gap, 0.5), 5);
        pen.fillRect(3, room + k * cell, 5, cell - Math.max(gap, 0.5));
      }
    };
    const at = (event) => {
      const box = canvas.getBoundingClientRect(), cell = (box.width - room) / canvas.cells.length;
      return [Math.floor((event.clientY - box.top - room) / cell), Math.floor((event.clientX - box.left - room) / cell)];
    };
    canvas.addEventListener("pointerdown", (event) => {
      const [q, k] = at(event);
      if (q < 0 && k >= 0) {
        state.globals = state.globals.includes(k) ? state.globals.filter((one) => one !== k) : [...state.globals, k].sort((a, b) => a - b);
        build();
        return;
      }
      const first = k <= state.sinks && q - k > state.before * state.step + 1;
      document.addEventListener("pointermove", drag);
      document.addEventListener("pointerup", () => document.removeEventListener("pointermove", drag), { once: true });
      drag(event);
      event.preventDefault();
      function drag(moved) {
        const [query, key] = at(moved), bound = (value) => Math.max(0, Math.min(canvas.cells.length - 1, value));
        const change = first ? { sinks: bound(key + 1) } : { before: bound(Math.round(Math.abs(query - key) / state.step)) };
        if (Object.entries(change).every(([name, value]) => state[name] === value)) return;
        Object.assign(state, change);
        build();
      }
    });
    return canvas;
  }
}
