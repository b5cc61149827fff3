import { describe, expect, it } from 'vitest';

import { changeOf, runHere, runOn, selectorOf } from '../src/remote';

describe('the line of a cell', () => {
  it.each([
    ['x = 1', null],
    ['', null],
    ['%%remote', ''],
    ['%%remote t\nx', 't'],
    ['%%remote t[0, 1:2] --out y\nx', 't[0, 1:2]'],
    ['%%remote --out y t[-1]\nx', 't[-1]'],
    ['%%remote --timeout 5 --raw\nx', ''],
    ['%%remote --warn-after 5\nx', ''],
    ['%%remote --warn-after 5 t\nx', 't'],
    ['%%remote --mesh t[0] --raw\nx', 't[0]'],
    ['%%remote --raw --mesh=t\nx', 't'],
    ['%%remote --mesh', ''],
    ['\n# why\n%%remote t\nx', 't'],
    ['%%remote t.slice(dp=0, tp=1)\n', 't.slice(dp=0, tp=1)'],
    ['x\n%%remote t', null],
    ['%%remote?', null],
    ['%%remotely t', null],
    ['%%time\nx', null]
  ])('%j is addressed to %j', (text, selector) => {
    expect(selectorOf(text)).toBe(selector);
  });

  it.each([
    ['x = 1', 't', '%%remote t\nx = 1'],
    ['', 't[0:2]', '%%remote t[0:2]\n'],
    ['x', '', '%%remote\nx'],
    ['%%remote t\nx', 't[0:4]', '%%remote t[0:4]\nx'],
    ['%%remote', 't', '%%remote t'],
    ['%%remote --out y t\nx', 'u', '%%remote u --out y\nx'],
    ['%%remote --out y\nx', 'u', '%%remote u --out y\nx'],
    ['%%remote --warn-after 5\nx', 'u', '%%remote u --warn-after 5\nx'],
    ['%%remote --raw --mesh t\nx', 'u', '%%remote u --raw\nx'],
    ['%%remote --mesh=t --raw\nx', 'u', '%%remote u --raw\nx'],
    ['# why\n%%remote t --raw\nx\n', 'u', '# why\n%%remote u --raw\nx\n'],
    ['%%time\nx', 't', '%%remote t\n%%time\nx']
  ])('%j is addressed to %j', (text, selector, expected) => {
    expect(runOn(text, selector)).toBe(expected);
    expect(selectorOf(expected)).toBe(selector);
  });

  it.each([
    ['%%remote t\nx\ny', 'x\ny'],
    ['# why\n%%remote t --out y\nx', '# why\nx'],
    ['%%remote', ''],
    ['x', 'x']
  ])('%j is taken away again', (text, expected) => {
    expect(runHere(text)).toBe(expected);
  });

  it.each(['x', 'x\ny\n', '# why\nx', ''])('comes and goes without a trace: %j', text => {
    expect(runHere(runOn(text, 't[0:2]'))).toBe(text);
  });
});

describe('the change', () => {
  it.each([
    ['x', '%%remote t\nx'],
    ['%%remote t\nx', '%%remote t[0:2]\nx'],
    ['%%remote t\nx', 'x'],
    ['aa', 'aaa'],
    ['x', 'x'],
    ['', 'x']
  ])('from %j to %j is small', (before, after) => {
    const { start, end, text } = changeOf(before, after);
    expect(before.slice(0, start) + text + before.slice(end)).toBe(after);
    expect(text.length + end - start).toBe(Math.abs(after.length - before.length));
  });
});
