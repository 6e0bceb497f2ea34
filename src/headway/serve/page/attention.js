// What a token attends to: one row of weights over the text, what the pattern let it see, and what follows if it did not.
import { post } from "/page/api.js";
import { fact, h, number, percent, say, shown, tell } from "/page/dom.js";
import { t } from "/page/texts.js";

const KINDS = { first: "F", previous: "P", induction: "I", same: "S", itself: "=", even: "~", mixed: "·" };
const state = { text: null, row: null, layer: 0, head: 0, span: null, cuts: [], draft: "" };

export function lookAt(app, asked) {
  Object.assign(state, { text: null, row: null, span: null, cuts: [], asked });
  if (location.hash === "#attention") dispatchEvent(new HashChangeEvent("hashchange"));
  else location.hash = "#attention";
}

export function attention(app) {
  if (!app.model) return [];
  const model = app.model.id;
  if (state.model !== model) Object.assign(state, { model, text: null, row: null, span: null, cuts: [] });
  state.layer = Math.min(state.layer, app.model.layers - 1);
  state.head = Math.min(state.head, app.model.heads - 1);
  const place = h("div.inspector");
  if (state.asked) ask(state.asked).finally(() => { state.asked = null; });
  else queueMicrotask(draw);  // when it has its place on the page
  return [place];

  async function ask(asked) {
    busy(true);
    try {
      state.text = await post("/v1/attention/heads", { model, ...asked });
      state.row = await row();
      say(null);
    } catch (error) {
      tell(error);
    }
    busy(false);
    draw();
  }

  function row() {
    return post("/v1/attention", { model, prompt: state.text.ids, query: state.text.query, layer: state.layer, head: state.head });
  }

  async function choose(layer, head) {
    Object.assign(state, { layer, head });
    busy(true);
    try { state.row = await row(); } catch (error) { tell(error); }
    busy(false);
    draw();
  }

  function busy(is) {
    place.setAttribute("aria-busy", is);
    if (is && !state.text) place.replaceChildren(h("p.welcome", {}, t("busy")));
  }

  function draw() {
    if (!state.text || !state.row) { place.replaceChildren(...opening()); return; }
    const old = place.querySelector(".row-text")?.scrollTop;
    place.replaceChildren(h("section.reading", {}, ...reading()), h("aside.numbers", {}, ...numbers()));
    const text = place.querySelector(".row-text"), query = text.querySelector(".query");
    if (old === undefined) text.scrollTop = query.offsetTop - text.clientHeight / 2;
    else text.scrollTop = old;
    new ResizeObserver(([{ target }]) => paint(target)).observe(place.querySelector("canvas"));
  }

  function opening() {
    const field = h("textarea", { id: "text", rows: 10, value: state.draft, oninput: () => { state.draft = field.value; } });
    field.setAttribute("aria-label", t("text"));
    return [h("form.opening", { onsubmit: (event) => { event.preventDefault(); if (field.value) ask({ prompt: field.value }); } },
      h("h1", {}, t("lookTitle")), h("p", {}, t("lookIntro")), field, h("button.main", {}, t("read")))];
  }

  // -- the text ------------------------------------------------------------------------------------------------

  function reading() {
    const { tokens, query } = state.text, { weights } = state.row;
    const fates = fateOf();
    const most = Math.max(...weights.map(Math.abs), 1e-9);
    const status = h("output.status", {}, t("hint"));
    const describe = (i) => { status.textContent = [t("tokenAt", i), `“${shown(tokens[i])}”`, `${t("weight")} ${number(weights[i])}`, why(i, fates[i])].join(" · "); };
    const spans = tokens.map((token, i) => h("span", {
      "data-i": i, "--w": Math.sqrt(Math.abs(weights[i]) / most).toFixed(3),
      className: [fates[i], i === query ? "query" : "", state.span && i >= state.span[0] && i < state.span[1] ? "span" : ""].join(" "),
    }, token === "" ? "·" : token.replace(/\n/g, "↵\n")));
    spans[query].tabIndex = 0;
    const text = h("div.row-text", { role: "listbox", onclick: pick, onkeydown: move, onpointerover: hover, onfocusin: hover }, ...spans);
    text.setAttribute("aria-label", t("whole", tokens.length));

    function hover({ target }) {
      if (target.dataset?.i) describe(Number(target.dataset.i));
    }
    function pick(event) {
      const i = event.target.dataset?.i;
      if (i === undefined) return;
      if (event.shiftKey || state.selecting) select(Number(i));
      else ask({ prompt: state.text.ids, query: Number(i) });
    }
    function move(event) {
      const i = Number(document.activeElement.dataset?.i);
      const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: tokens.length - 1, Enter: i, " ": i }[event.key];
      if (to === undefined || !spans[to]) return;
      event.preventDefault();
      if (to === i) { if (event.shiftKey || state.selecting) select(i); else ask({ prompt: state.text.ids, query: i }); return; }
      spans[to].tabIndex = 0;
      spans[to].focus();
      if (event.shiftKey) select(to);
    }

    const grid = h("div.heads", { role: "grid" }, ...state.text.heads.map((heads, layer) => h("div", { role: "row" }, h("span", {}, layer),
      ...heads.map((one, head) => h("button", {
        className: `kind-${one.kind}`, "--w": (1 - Math.min(1, Math.max(0, one.evenness ?? 0))).toFixed(3),
        title: `${t("layer")} ${layer}, ${t("head")} ${head}: ${t(`kinds.${one.kind}`)}`,
        ariaLabel: `${t("layer")} ${layer}, ${t("head")} ${head}: ${t(`kinds.${one.kind}`)}`,
        ariaPressed: String(layer === state.layer && head === state.head), onclick: () => choose(layer, head),
      }, KINDS[one.kind])))));
    const legend = h("p.note", {}, t("headsNote"), " ", Object.entries(KINDS).map(([kind, letter]) => h("span", {}, h("b", {}, letter), t(`kinds.${kind}`))));
    const strip = h("canvas.strip", { width: 10, height: 44, onclick: (event) => {
      const i = Math.floor(event.offsetX / strip.clientWidth * tokens.length);
      spans[i]?.scrollIntoView({ block: "center" });
      if (spans[i]) describe(i);
    } });
    strip.setAttribute("aria-label", t("whole", tokens.length));
    return [
      h("header", {}, h("h2", {}, `${t("layer")} ${state.layer} · ${t("head")} ${state.head}`), h("code", {}, state.row.pattern),
        h("button.plain", { onclick: () => lookAt(app, null) }, t("another"))),
      h("details.heads-all", { open: matchMedia("(min-width: 760px)").matches }, h("summary", {}, t("heads")), h("div.heads-row", {}, grid, legend)),
      h("p.note", {}, t("whole", tokens.length)), strip,
      h("div.legend", {}, ...["seen", "kept", "released", "later"].map((fate) => h(`span.${fate}`, {}, t(`fates.${fate}`))),
        h("label", {}, h("input", { type: "checkbox", checked: Boolean(state.selecting), onchange: ({ target }) => { state.selecting = target.checked; } }), t("spanMode"))),
      text, status];
  }

  function select(i) {
    const anchor = state.span && state.span[0] <= i ? state.span[0] : i;
    state.span = state.span && state.span[1] - state.span[0] > 1 ? [i, i + 1] : [anchor, i + 1];
    for (const one of place.querySelectorAll(".row-text span")) {
      one.classList.toggle("span", one.dataset.i >= state.span[0] && one.dataset.i < state.span[1]);
    }
    place.querySelector(".what-if").replaceWith(whatIf());
  }

  function fateOf() {
    const found = [];
    for (const [fate, first, end] of state.row.fates) found.fill(fate, found.length, (found.length = end)) && first;
    return found;
  }

  function why(i, fate) {
    const part = state.row.parts.find(({ runs }) => runs.some(([first, end]) => first <= i && i < end));
    return t(`why.${fate}`, fate === "seen" && part ? part.pattern : state.row.pattern, state.text.query - i);
  }

  // The whole text as one strip: of the tokens of a column the largest weight, and below it what became of them.
  function paint(canvas) {
    const ratio = devicePixelRatio, width = Math.max(1, Math.round(canvas.clientWidth * ratio)), height = Math.round(44 * ratio);
    Object.assign(canvas, { width, height });
    const { weights } = state.row, count = weights.length, fates = fateOf(), pen = canvas.getContext("2d");
    const css = getComputedStyle(document.documentElement), colour = (name) => css.getPropertyValue(name).trim();
    const most = Math.max(...weights.map(Math.abs), 1e-9), bars = height - 7 * ratio;
    const fills = { seen: colour("--heat"), kept: colour("--kept"), released: colour("--released"), later: "transparent" };
    for (let x = 0; x < width; x++) {
      const first = Math.floor(x / width * count), end = Math.max(first + 1, Math.floor((x + 1) / width * count));
      let largest = 0;
      for (let i = first; i < end && i < count; i++) largest = Math.max(largest, Math.abs(weights[i]));
      const tall = Math.sqrt(largest / most) * bars;
      pen.fillStyle = colour("--heat");
      pen.fillRect(x, bars - tall, 1, tall);
      pen.fillStyle = fills[fates[first]];
      pen.fillRect(x, bars + 3 * ratio, 1, 4 * ratio);
    }
    pen.fillStyle = colour("--ink");
    pen.fillRect((state.text.query + 0.5) / count * width - ratio, 0, 2 * ratio, height);
  }

  // -- the numbers ---------------------------------------------------------------------------------------------

  function numbers() {
    const { row: told, text } = state, counts = { seen: 0, kept: 0, released: 0, later: 0 };
    for (const [fate, first, end] of told.fates) counts[fate] += end - first;
    const { shares, mean_shares: mean } = told, kept = told.retention;
    const bars = [["sink", "first"], ["previousShare", "previous"], ["itselfShare", "itself"], ["inductionShare", "induction"], ["sameShare", "same"]];
    return [
      card("next", h("p.lead", {}, `${t("query")} `, h("code", {}, shown(text.tokens[text.query])), ` · ${text.query}`),
        h("ol.bars", {}, ...text.next.slice(0, 6).map((one) => bar(shown(one.token), Math.exp(one.log_prob))))),
      card("row", h("p.lead", {}, t("kindNote", t(`kinds.${shares.kind}`), t(`kinds.${mean.kind}`))),
        h("ol.bars.words", {}, ...bars.map(([name, share]) => bar(t(name), shares[share], mean[share]))), h("p.note", {}, t("sharesNote")),
        h("dl", {}, fact(t("entropy"), t("entropyOf", number(shares.entropy), shares.evenness === null ? "–" : percent(shares.evenness))))),
      card("exact", h("dl", {}, fact(t("sum"), told.sum.toFixed(7)), fact(t("difference"), t("differenceOf", told.difference.toExponential(1), number(told.largest))),
        fact(t("keys"), text.stored ? t("keysHeld", text.stored, text.computed) : t("keysRead", text.tokens.length)))),
      card("visible", h("dl", {}, fact(t("pattern"), h("code", {}, told.pattern))),
        h("p", {}, t("visibleOf", counts.seen, counts.kept, counts.released, counts.later)),
        h("p.note", {}, kept.reach === null ? t("retentionAll") : t("retention", kept.reach, kept.sinks))),
      pages(),
      whatIf(),
    ];
  }

  function pages() {
    const { page, classes } = state.text.pages;
    const rows = classes.map(({ layers, state: sums, fates }) => h("div.pages", {}, h("small", {}, t("layersOf", layers.join(", ")), sums ? ` · ${t("sums")}` : ""),
      h("div.cells", {}, ...fates.map((fate, i) => h(`i.page-${fate}`, { title: `${i * page}–${i * page + page - 1}: ${t(`pageFates.${fate}`)}` })))));
    const there = new Set(classes.flatMap(({ fates }) => fates));
    return card("pages", h("p.note", {}, t("pagesNote", page)), ...rows,
      h("p.legend", {}, ...[...there].map((fate) => h("span", {}, h(`i.page-${fate}`), t(`pageFates.${fate}`)))));
  }

  function whatIf() {
    const { layer, head, span, text } = state, one = span && span[1] - span[0] === 1;
    const scope = h("select", { ariaLabel: t("scope"), onchange: () => { state.scope = scope.value; } },
      h("option", { value: "everywhere" }, t("everywhere")), h("option", { value: "here" }, t("here")));
    scope.value = state.scope ?? "everywhere";
    const where = () => (scope.value === "here" ? { layer, head } : {});
    const add = (cut) => { state.cuts.push(cut); compare(); };
    const chips = state.cuts.map((cut, i) => h("button.chip", { title: t("remove"), onclick: () => { state.cuts.splice(i, 1); compare(); } }, named(cut), " ×"));
    const result = state.compared && state.cuts.length ? compared() : null;
    return card("whatIf.what-if", h("p.note", {}, t("whatIfNote")),
      h("div.buttons", {}, h("button", { id: "cut-head", onclick: () => add({ layer, head }) }, t("cutHead")),
        one ? h("button", { onclick: () => add({ ...where(), queries: [text.query, text.query + 1], keys: span }) }, t("cutEdge", shown(text.tokens[span[0]]))) : null,
        span ? h("button", { id: "cut-span", onclick: () => add({ ...where(), keys: span }) }, t("cutSpan", span[0], span[1] - 1)) : null, span ? scope : null),
      span ? null : h("p.note", {}, t("cutNone")),
      h("div.buttons", {}, ...chips), result);
  }

  function named({ layer, head, queries, keys }) {
    const span = (pair) => (pair[1] - pair[0] === 1 ? pair[0] : `${pair[0]}–${pair[1] - 1}`);
    const at = layer === undefined ? t("everywhere") : `L${layer} H${head}`;
    return [at, keys ? `${queries ? `${span(queries)} → ` : ""}${span(keys)}` : ""].filter(Boolean).join(" · ");
  }

  async function compare() {
    const card = place.querySelector(".what-if");
    card.setAttribute("aria-busy", "true");
    card.append(h("p.note", {}, t("computing")));
    try {
      state.compared = state.cuts.length ? await post("/v1/what-if", { model, prompt: state.text.ids, query: state.text.query, cuts: state.cuts }) : null;
    } catch (error) {
      state.cuts.pop();
      tell(error);
    }
    place.querySelector(".what-if").replaceWith(whatIf());
  }

  function compared() {
    const { tokens, divergence } = state.compared;
    return h("div", {}, h("p.lead", {}, t("divergence", number(divergence))),
      h("p.legend", {}, h("span.was", {}, t("before")), h("span.now", {}, t("after"))),
      h("ol.bars.both", {}, ...tokens.slice(0, 12).map((one) => bar(shown(one.token), Math.exp(one.after), Math.exp(one.before)))));
  }

  function card(name, ...content) {
    const [text, more] = name.split(".");
    return h(`section.card${more ? `.${more}` : ""}`, {}, h("h3", {}, t(text)), ...content);
  }

  function bar(name, share, other) {
    const given = { "--w": Math.min(1, Math.max(0, share)).toFixed(4) };
    if (other !== undefined) given["--was"] = Math.min(1, Math.max(0, other)).toFixed(4);
    return h("li", given, h("code", {}, name), h("span", {}, percent(share), other !== undefined ? h("small", {}, percent(other)) : null));
  }
}
