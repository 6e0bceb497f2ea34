// A rotary pair, turned by hand: its angle is position times theta.
import { h, slider, svg } from "/page/dom.js";
import { t } from "/page/texts.js";

const PAIRS = 32, SIDE = 320, RADIUS = 120;
const state = { m: 9, n: 3, i: 8, base: 10000, q: 0.35, k: -0.2 };

export function rotary() {
  const arrows = {}, said = {};
  const theta = () => state.base ** (-state.i / PAIRS);
  const angle = (who) => (who === "q" ? state.q + state.m * theta() : state.k + state.n * theta());
  const controls = {
    m: slider(t("queryAt"), state.m, [0, 64], (m) => set({ m })),
    n: slider(t("keyAt"), state.n, [0, 64], (n) => set({ n })),
    i: slider(t("pairNumber"), state.i, [0, PAIRS - 1], (i) => set({ i })),
  };
  let last = 0;
  const together = slider(t("both"), 0, [-32, 32], (to) => {
    const by = Math.max(-Math.min(state.m, state.n), to - last);
    last = to;
    set({ m: state.m + by, n: state.n + by });
  });

  function arrow(who) {
    const ghost = svg("line", { class: `ghost ${who}`, x1: 0, y1: 0 }), line = svg("line", { class: `arrow ${who}`, x1: 0, y1: 0 });
    const knob = svg("circle", { class: `knob ${who}`, r: 11, tabindex: 0, role: "slider", "aria-label": t(who === "q" ? "queryAt" : "keyAt"), onpointerdown: (event) => grab(event, who) });
    knob.addEventListener("keydown", ({ key }) => {
      const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[key];
      const name = who === "q" ? "m" : "n";
      if (by) set({ [name]: Math.max(0, Math.min(64, state[name] + by)) });
    });
    arrows[who] = { ghost, line, knob };
    return [ghost, line, knob];
  }

  const fan = svg("path", { class: "between" });
  const circle = svg("svg", { viewBox: `${-SIDE / 2} ${-SIDE / 2} ${SIDE} ${SIDE}`, class: "circle", role: "img" },
    svg("circle", { class: "ring", r: RADIUS }), svg("line", { class: "axis", x1: -RADIUS, x2: RADIUS }), svg("line", { class: "axis", y1: -RADIUS, y2: RADIUS }), fan, ...arrow("k"), ...arrow("q"));

  // The product by distance: a wave, on which this pair stands at one place.
  const wave = svg("path", { class: "wave" });
  const curve = svg("svg", { viewBox: "-66 -1.5 132 3", preserveAspectRatio: "none", class: "curve", "aria-hidden": "true" }, svg("line", { class: "axis", x1: -64, x2: 64 }), svg("line", { class: "axis", y1: -1.2, y2: 1.2 }), wave);
  const dot = h("i.dot");

  // An arrow follows the pointer to the nearest position whose angle it has; theta below a degree turns slowly.
  function grab(event, who) {
    event.preventDefault();
    const name = who === "q" ? "m" : "n";
    let before = at(event), exact = state[name];
    const move = (moved) => {
      const now = at(moved);
      const by = Math.atan2(Math.sin(now - before), Math.cos(now - before));
      before = now;
      exact = Math.max(0, Math.min(64, exact + by / theta()));
      set({ [name]: Math.round(exact) });
    };
    document.addEventListener("pointermove", move);
    document.addEventListener("pointerup", () => document.removeEventListener("pointermove", move), { once: true });
  }

  function at(event) {
    const box = circle.getBoundingClientRect();
    return Math.atan2(-(event.clientY - box.top - box.height / 2), event.clientX - box.left - box.width / 2);
  }

  for (const name of ["q", "k", "theta", "product"]) said[name] = h("dd", {});
  const row = (name, text) => h("div.fact", {}, h("dt", {}, text), said[name]);

  function set(change) {
    Object.assign(state, change);
    for (const [name, control] of Object.entries(controls)) control.set(state[name]);
    for (const who of "qk") {
      const { ghost, line, knob } = arrows[who], start = who === "q" ? state.q : state.k, to = angle(who);
      const end = (a, r) => [r * Math.cos(a), -r * Math.sin(a)].map((x) => x.toFixed(2));
      const put = (one, [x, y], names) => { one.setAttribute(names[0], x); one.setAttribute(names[1], y); };
      put(ghost, end(start, RADIUS), ["x2", "y2"]);
      put(line, end(to, RADIUS), ["x2", "y2"]);
      put(knob, end(to, RADIUS), ["cx", "cy"]);
      const position = who === "q" ? state.m : state.n;
      knob.setAttribute("aria-valuenow", position);
      said[who].textContent = `${position} · ${t("turned", who === "q" ? "m" : "n", (position * theta() * 180 / Math.PI).toFixed(1))}`;
    }
    const [from, to] = [angle("k"), angle("q")], gap = Math.atan2(Math.sin(to - from), Math.cos(to - from));
    const point = (a) => `${(0.35 * RADIUS * Math.cos(a)).toFixed(2)} ${(-0.35 * RADIUS * Math.sin(a)).toFixed(2)}`;
    fan.setAttribute("d", `M0 0L${point(from)}A${0.35 * RADIUS} ${0.35 * RADIUS} 0 0 ${gap > 0 ? 0 : 1} ${point(from + gap)}Z`);
    const value = (distance) => Math.cos(distance * theta() + state.q - state.k);
    wave.setAttribute("d", Array.from({ length: 513 }, (_, x) => `${x ? "L" : "M"}${x / 4 - 64} ${(-value(x / 4 - 64)).toFixed(3)}`).join(""));
    dot.style.left = `${((state.m - state.n + 66) / 132) * 100}%`;
    dot.style.top = `${((1.5 - value(state.m - state.n)) / 3) * 100}%`;
    said.theta.textContent = `${state.base}^(−${state.i}/${PAIRS}) = ${theta().toPrecision(4)}`;
    said.product.textContent = `cos(${state.m - state.n} θ ${state.q - state.k < 0 ? "−" : "+"} ${Math.abs(state.q - state.k).toFixed(2)}) = ${Math.cos(to - from).toFixed(4)}`;
    circle.setAttribute("aria-label", said.product.textContent);
  }

  set({});
  return [h("section.declare", {}, h("h1", {}, t("rotaryTitle")), h("p", {}, t("rotaryIntro")), h("div.controls", {}, ...Object.values(controls), together),
    h("dl.facts", {}, row("q", t("queryAt")), row("k", t("keyAt")), row("theta", "θ"), row("product", t("product"))), h("p.note", {}, t("sameProduct"))),
  h("section.drawn", {}, circle, h("div.curve-of", {}, curve, dot), h("p.note", {}, t("distances")))];
}
