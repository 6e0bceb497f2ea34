// A conversation, or a text that is continued, written token by token.
import { settings, stream } from "/page/api.js";
import { lookAt } from "/page/attention.js";
import { h, percent, shown, tell } from "/page/dom.js";
import { markdown } from "/page/markdown.js";
import { t } from "/page/texts.js";

const ALTERNATIVES = 5;
const turns = [];
let writing = null;

export function chat(app) {
  const log = h("section.log", { ariaLive: "polite" });
  const field = h("textarea", {
    id: "say", rows: 1, placeholder: t(app.model?.chat ? "say" : "begin"),
    oninput: () => grow(field),
    onkeydown: (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
      if (event.key === "Escape") writing?.abort();
    },
  });
  field.setAttribute("aria-label", field.placeholder);
  const button = h("button.main", { id: "send", onclick: () => (writing ? writing.abort() : send()) });
  const reset = h("button.plain", { onclick: () => { writing?.abort(); turns.length = 0; draw(); field.focus(); } }, t("newChat"));
  const state = () => {
    button.textContent = t(writing ? "stop" : "send");
    button.classList.toggle("stop", Boolean(writing));
    reset.hidden = !turns.length;
  };

  function draw() {
    const name = app.model?.id ?? "headway";
    const empty = h("div.welcome", {}, h("h1", {}, t("welcome")), h("p", {}, t(app.model?.chat ? "welcomeChat" : "welcomeText", name)));
    log.replaceChildren(...(turns.length ? turns.map((turn) => turn.element ?? drawn(turn)) : [empty]));
    for (const turn of turns) refresh(turn);
    state();
  }

  function drawn(turn) {
    turn.element = h(`article.turn.${turn.role}`);
    return turn.element;
  }

  async function write(turn, request, path) {
    writing = new AbortController();
    turn.began = performance.now();
    state();
    try {
      for await (const event of stream(path, request, writing.signal)) {
        const [choice] = event.choices;
        if (event.usage) turn.usage = event.usage;
        if (!choice) continue;
        turn.prompt = choice.prompt_token_ids ?? turn.prompt;
        turn.ids.push(...choice.token_ids);
        turn.text += choice.delta ? choice.delta.content ?? "" : choice.text;
        turn.tokens.push(...told(choice.logprobs));
        turn.finish = choice.finish_reason ?? turn.finish;
        turn.seconds = (performance.now() - turn.began) / 1000;
        soon(turn);
      }
    } catch (error) {
      turn.finish = "stopped";
      tell(error);
    }
    turn.done = true;
    writing = null;
    if (!turn.ids.length) unsay(turn);
    refresh(turn);
    state();
  }

  // What was not answered goes back into the field.
  function unsay(turn) {
    turns.splice(turns.indexOf(turn), 1);
    const asked = turn.plain ? turn.given : turns.at(-1)?.role === "user" ? turns.pop().text : "";
    field.value ||= asked;
    grow(field);
    draw();
  }

  // No more often than a picture is drawn.
  function soon(turn) {
    turn.frame ??= requestAnimationFrame(() => { turn.frame = undefined; refresh(turn); });
  }

  function refresh(turn) {
    const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    turn.element.replaceChildren(...(turn.role === "user" ? [h("p", {}, turn.text)] : answer(turn)));
    if (near || !turn.done) log.scrollTop = log.scrollHeight;
  }

  function answer(turn) {
    const body = turn.shows === "tokens" ? [spans(turn)] : turn.plain ? [plain(turn)] : markdown(turn.text);
    const content = h("div.content", {}, ...body, turn.done ? null : h("span.cursor"));
    if (!turn.done) return [content];
    const action = (name, does) => h("button.plain", { onclick: does }, t(name));
    const ids = [...(turn.prompt ?? []), ...turn.ids];
    return [content, h("div.actions", {},
      ids.length ? action("look", () => lookAt(app, { prompt: ids })) : null,
      turn.tokens.length ? action(turn.shows === "tokens" ? "reading" : "tokens", () => {
        turn.shows = turn.shows === "tokens" ? "text" : "tokens";
        refresh(turn);
      }) : null,
      action("copy", () => navigator.clipboard.writeText(turn.text)),
      turn.plain && ids.length ? action("goOn", () => goOn(turn, ids)) : null,
      h("small", {}, remarks(turn).join(" · ")))];
  }

  const plain = (turn) => h("p.plain-text", {}, h("span.given", {}, turn.given), turn.text);

  // Each token by how probable it was; one that is chosen tells what else there was.
  function spans(turn) {
    const choose = ({ target, key }) => {
      if (key && key !== "Enter" && key !== " ") return;
      const token = turn.tokens[target.dataset?.i];
      if (!token) return;
      made.parentElement.querySelector(".instead")?.remove();
      for (const other of made.children) other.removeAttribute("aria-current");
      target.setAttribute("aria-current", "true");
      made.after(instead(turn, token, Number(target.dataset.i)));
    };
    const made = h("p.plain-text.tokens", { onclick: choose, onkeyup: choose }, ...turn.tokens.map((token, i) =>
      h("span", { "data-i": i, tabIndex: 0, role: "button", "--p": Math.exp(token.logprob).toFixed(3) }, token.token)));
    return made;
  }

  function instead(turn, token, i) {
    const bars = token.top.map(([text, logprob]) => h("li", { "--w": Math.exp(logprob).toFixed(4), className: logprob === token.logprob ? "chosen" : "" },
      h("code", {}, shown(text)), h("span", {}, percent(Math.exp(logprob)))));
    return h("aside.instead", {},
      h("p", {}, h("code", {}, shown(token.token)), ` ${t("probability")} ${percent(Math.exp(token.logprob))}`),
      h("ol.bars", {}, ...bars),
      h("button.plain", { onclick: () => lookAt(app, { prompt: [...turn.prompt, ...turn.ids], query: turn.prompt.length + i - 1 }) }, t("attentionOf")));
  }

  function remarks(turn) {
    const said = [];
    if (turn.finish === "length") said.push(t("reachedLength"));
    if (turn.finish === "stopped") said.push(t("stopped"));
    if (turn.ids.length > 1) said.push(t("written", turn.ids.length, (turn.ids.length / turn.seconds).toFixed(1)));
    const cached = turn.usage?.prompt_tokens_details.cached_tokens;
    if (cached) said.push(t("cachedPrompt", cached, turn.usage.prompt_tokens));
    return said;
  }

  const how = () => ({
    model: app.model.id, stream: true, stream_options: { include_usage: true }, return_token_ids: true,
    temperature: Number(settings.temperature), max_tokens: Number(settings.max_tokens),
    ...(settings.seed === "" ? {} : { seed: Number(settings.seed) }),
  });

  function start(turn, request, path) {
    Object.assign(turn, { role: "assistant", text: turn.text ?? "", tokens: turn.tokens ?? [], ids: turn.ids ?? [], done: false, finish: null });
    if (!turns.includes(turn)) turns.push(turn);
    draw();
    write(turn, request, path);
  }

  function send() {
    const text = field.value;
    if (!text.trim() || writing || !app.model) return;
    field.value = "";
    grow(field);
    if (!app.model.chat) {
      start({ plain: true, given: text }, { ...how(), prompt: text, logprobs: ALTERNATIVES }, "/v1/completions");
      return;
    }
    turns.push({ role: "user", text, done: true });
    const system = settings.system ? [{ role: "system", content: settings.system }] : [];
    const messages = [...system, ...turns.map((turn) => ({ role: turn.role, content: turn.text }))];
    start({}, { ...how(), messages, logprobs: true, top_logprobs: ALTERNATIVES }, "/v1/chat/completions");
  }

  function goOn(turn, ids) {
    const more = { plain: true, given: turn.given + turn.text };
    if (!writing) start(more, { ...how(), prompt: ids, logprobs: ALTERNATIVES }, "/v1/completions");
  }

  draw();
  setTimeout(() => field.focus({ preventScroll: true }));
  return [log, h("div.composer", {}, field, button, reset)];
}

function grow(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 220)}px`;
}

// Tokens with their log-probabilities, from either protocol.
function told(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({ token, logprob, top: top.map((one) => [one.token, one.logprob]) }));
  }
  return logprobs.tokens.map((token, i) => ({ token, logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs[i]) }));
}
