// A small Markdown, as elements: headings, lists, quotes, code, emphasis. Links and images stay text, as markup does.
import { h } from "/page/dom.js";

const INLINE = /(`+)([\s\S]+?)\1|\*\*(\S[\s\S]*?)\*\*|\*(\S[^*]*?)\*|__(\S[\s\S]*?)__/;

function inline(text) {
  const made = [];
  for (let rest = text; rest; ) {
    const found = INLINE.exec(rest);
    if (!found) return [...made, rest];
    if (found.index) made.push(rest.slice(0, found.index));
    const [all, , code, strong, emphasis, strong2] = found;
    made.push(code !== undefined ? h("code", {}, code)
      : emphasis !== undefined ? h("em", {}, ...inline(emphasis)) : h("strong", {}, ...inline(strong ?? strong2)));
    rest = rest.slice(found.index + all.length);
  }
  return made;
}

// Each kind of block: how its lines begin, and what is made of them.
const BLOCKS = [
  [/^\s*[-*+]\s+/, (lines) => h("ul", {}, ...lines.map((line) => h("li", {}, ...inline(line))))],
  [/^\s*\d+[.)]\s+/, (lines) => h("ol", {}, ...lines.map((line) => h("li", {}, ...inline(line))))],
  [/^>\s?/, (lines) => h("blockquote", {}, ...markdown(lines.join("\n")))],
];

export function markdown(text) {
  const lines = text.split("\n"), made = [];
  let paragraph = [];
  const close = () => {
    if (paragraph.length) made.push(h("p", {}, ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i], fence = /^\s*(```+|~~~+)/.exec(line), heading = /^(#{1,6})\s+(.*)/.exec(line);
    const block = BLOCKS.find(([begins]) => begins.test(line));
    if (fence || heading || block || !line.trim()) close();
    if (fence) {
      const code = [];
      while (++i < lines.length && !lines[i].trim().startsWith(fence[1])) code.push(lines[i]);
      made.push(h("pre", {}, h("code", {}, code.join("\n"))));
    } else if (heading) {
      made.push(h(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2])));
    } else if (block) {
      const own = [];
      for (; i < lines.length && block[0].test(lines[i]); i++) own.push(lines[i].replace(block[0], ""));
      i--;
      made.push(block[1](own));
    } else if (line.trim()) {
      paragraph.push(line);
    }
  }
  close();
  return made;
}
