// What the server is asked.

export const settings = {
  temperature: 0.8, seed: "", max_tokens: 200, system: "",
  ...JSON.parse(localStorage.getItem("settings") ?? "{}"),
  key: sessionStorage.getItem("key") ?? "",
};

export function keep() {
  const { key, ...rest } = settings;
  localStorage.setItem("settings", JSON.stringify(rest));
  sessionStorage.setItem("key", key);
}

async function ask(path, body, signal) {
  const headers = settings.key ? { authorization: `Bearer ${settings.key}` } : {};
  const how = body === undefined ? { headers } : {
    method: "POST", signal, body: JSON.stringify(body), headers: { ...headers, "content-type": "application/json" },
  };
  const answer = await fetch(path, how);
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw Object.assign(new Error(told?.error?.message ?? `${answer.status} ${answer.statusText}`), { status: answer.status });
}

export const get = async (path) => (await ask(path)).json();
export const post = async (path, body, signal) => (await ask(path, body, signal)).json();

// The events of an answer, one after the other. Where they come faster than they are drawn, the page has its turn in
// between: what has arrived is read without a pause otherwise, and nothing is drawn and no key heard until the end.
export async function* stream(path, body, signal) {
  let begun = performance.now();
  const reader = (await ask(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const told = JSON.parse(data);
      if (told.error) throw new Error(told.error.message);
      yield told;
      if (performance.now() - begun > 20) {
        await new Promise((go) => setTimeout(go));
        begun = performance.now();
      }
    }
  }
}
