// Elements from values: text is always text, never markup.
import { t } from "/page/texts.js";

export function h(tag, given = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name || "div");
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(given)) {
    if (value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) made.style.setProperty(key, value);
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, given = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(given)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export const fact = (name, value, note) =>
  h("div.fact", {}, h("dt", {}, name), h("dd", {}, value, note ? h("small", {}, note) : null));

// A labelled range; `change` is given its number.
export function slider(label, value, [min, max, step = 1], change) {
  const shown = h("output", {}, String(value));
  const input = h("input", { type: "range", min, max, step, oninput: () => {
    shown.textContent = input.value;
    change(Number(input.value));
  } });
  input.value = value;
  const made = h("label.slider", {}, h("span", {}, label), input, shown);
  made.set = (to, most) => {
    if (most !== undefined) input.max = most;
    input.value = to;
    shown.textContent = input.value;
  };
  return made;
}

export const percent = (share) =>
  share >= 0.1 ? `${(100 * share).toFixed(0)} %` : share >= 0.001 ? `${(100 * share).toFixed(1)} %` : share > 0 ? "< 0.1 %" : "0 %";

export const number = (value, digits = 3) => (value === null || value === undefined ? "–" : Number(value).toPrecision(digits));

// A token where it stands by itself: blanks are made visible.
export const shown = (text) => (text === "" ? "·" : text.replace(/\n/g, "↵").replace(/\t/g, "→").replace(/^ /, "␣"));

export function say(message) {
  const alert = document.getElementById("alert");
  alert.hidden = !message;
  alert.textContent = message ?? "";
}

export function tell(error) {
  if (error.name === "AbortError") return;
  say(error.status === 401 ? t("needsKey") : error instanceof TypeError ? t("noServer") : error.message);
  if (error.status === 401) {
    document.getElementById("open-settings").click();
    document.querySelector("#settings [name=key]").focus();
  }
}
