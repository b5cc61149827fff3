// The `%%remote` line of a cell: read, written and taken away again, as text. `monarch_kernel/notebook/syntax/cell_kind.py` reads it
// for good; here it is only edited.

/** The line with the magic. */
interface RemoteLine {
  /** Where it begins, and where the code begins. */
  start: number;
  end: number;
  /** Its words after the magic's name, with those in brackets kept together. */
  words: string[];
  /** Which of them is the selector; -1 if it is left out. */
  selectorAt: number;
}

const HEADER = /^[ \t]*%%remote(?![\w.?])([^\n]*)(\n|$)/;

// Options whose next word is not the selector.
const TAKES_A_WORD = new Set(['-t', '--targets', '--ranks', '-o', '--out', '--timeout', '--mesh']);

/** What a cell is addressed to: its selector, empty for the mesh last brought up; null if it runs in the kernel. */
export function selectorOf(text: string): string | null {
  const line = remoteLine(text);
  return line && (line.words[line.selectorAt] ?? '');
}

/** The cell, to be run on a mesh or a part of one; options that its line has are kept. */
export function runOn(text: string, selector: string): string {
  const line = remoteLine(text);
  if (!line) {
    return `${header([selector])}\n${text}`;
  }
  const words = line.words.filter((_, at) => at !== line.selectorAt);
  const written = header([selector, ...words]);
  return text.slice(0, line.start) + written + (text[line.end - 1] === '\n' ? '\n' : '') + text.slice(line.end);
}

/** The cell, to be run in the kernel. */
export function runHere(text: string): string {
  const line = remoteLine(text);
  return line ? text.slice(0, line.start) + text.slice(line.end) : text;
}

/** The smallest change that makes one text of another: what is written between `start` and `end`. */
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
  const selectorAt = words.findIndex((word, at) => !word.startsWith('-') && !TAKES_A_WORD.has(words[at - 1]));
  return { start, end: start + found[0].length, words, selectorAt };
}

/** Where the first line begins that is neither empty nor a comment. */
function firstCode(text: string): number {
  return /^(?:[ \t]*(?:#[^\n]*)?\n)*/.exec(text)![0].length;
}

/** Words are parted by blanks outside of brackets: `t[0, 1]` is one. */
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
