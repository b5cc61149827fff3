// Reads, writes and removes the `%%remote` line of a cell, as text, for editing only.
// `monarch_kernel/notebook/syntax/cell_kind.py` parses it when the cell runs.

/** The line with the magic. */
interface RemoteLine {
  /** Offsets of the line, and of the code after it. */
  start: number;
  end: number;
  /** The words after the name of the magic; brackets keep words together. */
  words: string[];
  /** Index of the word that has the selector, which may be the value of `--mesh`; -1 if there is none. */
  selectorAt: number;
  /** The selector; empty for the mesh last brought up. */
  selector: string;
}

const HEADER = /^[ \t]*%%remote(?![\w.?])([^\n]*)(\n|$)/;

// Options that take a word, which is not the selector. A test compares them with those of the magic.
const TAKES_A_WORD = new Set(['-t', '--targets', '--ranks', '-o', '--out', '--timeout', '--warn-after', '--mesh']);

/** The selector of a cell; empty for the mesh last brought up, null if the cell runs in the kernel. */
export function selectorOf(text: string): string | null {
  const line = remoteLine(text);
  return line && line.selector;
}

/** Make the cell run on a mesh or a part of one; keeps the options of its line. */
export function runOn(text: string, selector: string): string {
  const line = remoteLine(text);
  if (!line) {
    return `${header([selector])}\n${text}`;
  }
  const { selectorAt } = line;
  const words = line.words.filter((word, at) => at !== selectorAt && !(word === '--mesh' && at === selectorAt - 1));
  const written = header([selector, ...words]);
  return text.slice(0, line.start) + written + (text[line.end - 1] === '\n' ? '\n' : '') + text.slice(line.end);
}

/** Make the cell run in the kernel. */
export function runHere(text: string): string {
  const line = remoteLine(text);
  return line ? text.slice(0, line.start) + text.slice(line.end) : text;
}

/** Find the smallest change from one text to another: the text that replaces `start` to `end`. */
export function changeOf(before: string, after: string): { start: number; end: number; text: string } {
  const most = Math.min(before.length, after.length);
  let start = 0;
  while (start < most && before[start] === after[start]) {
    start += 1;
  }
  let same = 0;
  while (same < most - start && before[before.length - 1 - same] === after[after.length - 1 - same]) {
    same += 1;
  }
  return { start, end: before.length - same, text: after.slice(start, after.length - same) };
}

function header(words: string[]): string {
  return ['%%remote', ...words].filter(Boolean).join(' ');
}

function remoteLine(text: string): RemoteLine | null {
  const start = firstCode(text);
  const found = HEADER.exec(text.slice(start));
  if (!found) {
    return null;
  }
  const words = splitWords(found[1]);
  let selectorAt = words.findIndex((word, at) => !word.startsWith('-') && !TAKES_A_WORD.has(words[at - 1]));
  if (selectorAt < 0) {
    selectorAt = words.findIndex((word, at) => word.startsWith('--mesh=') || words[at - 1] === '--mesh');
  }
  const selector = (words[selectorAt] ?? '').replace(/^--mesh=/, '');
  return { start, end: start + found[0].length, words, selectorAt, selector };
}

/** The offset of the first line that is neither empty nor a comment. */
function firstCode(text: string): number {
  return /^(?:[ \t]*(?:#[^\n]*)?\n)*/.exec(text)![0].length;
}

/** Split a line at spaces outside brackets: `t[0, 1]` is one word. */
function splitWords(line: string): string[] {
  const words: string[] = [];
  let word = '';
  let depth = 0;
  for (const each of line) {
    depth += '[('.includes(each) ? 1 : '])'.includes(each) ? -1 : 0;
    if (depth <= 0 && /\s/.test(each)) {
      words.push(word);
      word = '';
    } else {
      word += each;
    }
  }
  return [...words, word].filter(Boolean);
}
