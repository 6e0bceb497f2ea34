// The frame: models, views by the address, language, theme, settings.
import { get, keep, post, settings } from "/page/api.js";
import { attention } from "/page/attention.js";
import { chat } from "/page/chat.js";
import { h, say, tell } from "/page/dom.js";
import { patterns } from "/page/patterns.js";
import { rotary } from "/page/rotary.js";
import { language, switchLanguage, t } from "/page/texts.js";

const VIEWS = { chat, attention, patterns, rotary };
const one = (id) => document.getElementById(id);
const app = { models: [], model: null };

function words() {
  document.documentElement.lang = ["en", "zh"][language];
  for (const at of document.querySelectorAll("[data-t]")) at.textContent = t(at.dataset.t);
  for (const at of document.querySelectorAll("[data-label]")) {
    at.title = t(at.dataset.label);
    at.setAttribute("aria-label", t(at.dataset.label));
  }
  for (const at of document.querySelectorAll("[data-hint]")) at.placeholder = t(at.dataset.hint);
  one("language").textContent = ["中", "EN"][language];
}

function show() {
  const name = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "chat";
  for (const tab of one("tabs").children) {
    if (tab.hash === `#${name}`) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  say(null);
  one("view").className = name;
  one("view").replaceChildren(...VIEWS[name](app));
  one("view").focus({ preventScroll: true });
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name ?? "");
}

async function begin() {
  words();
  theme(localStorage.getItem("theme") || null);
  const form = one("settings").querySelector("form");
  for (const [name, value] of Object.entries(settings)) form.elements[name].value = value;
  form.addEventListener("input", ({ target }) => { settings[target.name] = target.value; keep(); });
  one("open-settings").addEventListener("click", () => one("settings").open || one("settings").showModal());
  one("settings").addEventListener("click", ({ target }) => target === one("settings") && one("settings").close());
  one("language").addEventListener("click", () => { switchLanguage(); words(); show(); });
  one("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    theme(dark === "dark" ? "light" : "dark");
    show();
  });
  one("model").addEventListener("change", () => choose(one("model").value).catch(tell));
  addEventListener("hashchange", show);
  try {
    await list();
    one("model").replaceChildren(...app.models.map((model) => h("option", { value: model.id }, model.id)));
    one("model").hidden = !app.models.length;
    if (app.models.length) await choose(app.models[0].id);
    else show();
  } catch (error) {
    show();
    tell(error);
  }
}

// Models that write, and those of which that is not known before they are loaded.
async function list() {
  app.models = (await get("/v1/models")).data.filter((model) => model.layers || model.state === "unloaded");
}

async function choose(name) {
  const find = () => app.models.find((model) => model.id === name) ?? null;
  if (!find().layers) {
    say(t("loading", name));
    await post("/tokenize", { model: name, prompt: name });  // loads it
    await list();
  }
  app.model = find();
  show();
}

begin();
