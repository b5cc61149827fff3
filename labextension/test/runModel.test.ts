import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';

import type { RunFrame } from '../src/model';
import { aboutRun, boundsOf, choose, figure, knobsOf, pathOf, size } from '../src/runModel';

const RUNS: RunFrame[] = JSON.parse(
  readFileSync(new URL('../../tests/notebook/view/golden/runs.json', import.meta.url), 'utf8')
).runs;

type Kinds<T> = Record<keyof T, 'string' | 'number' | 'object'>;

const RUN: Kinds<RunFrame> = {
  name: 'string',
  outcome: 'string',
  problem: 'string',
  started: 'number',
  took: 'number',
  steps: 'number',
  cells: 'number',
  deaths: 'number',
  metric: 'string',
  curve: 'object',
  last: 'object',
  knobs: 'object',
  nbytes: 'number',
  damage: 'object'
};

describe('the list of runs', () => {
  it('has the fields that the kernel sends', () => {
    expect(RUNS.length).toBe(2);
    for (const run of RUNS) {
      for (const [name, value] of Object.entries(run)) {
        expect(typeof value, name).toBe(RUN[name as keyof RunFrame]);
      }
    }
    expect(Object.keys(RUNS[0]).sort()).toEqual(Object.keys(RUN).filter(name => name !== 'problem').sort());
  });

  it('describes a run', () => {
    expect(aboutRun(RUNS[0])).toBe('ok · 6 steps · loss 0.25 · 90.1 kB');
    expect(knobsOf(RUNS[0])).toBe('lr 0.5 from step 2');
    expect(aboutRun({ name: 'a', outcome: 'unreadable', problem: 'it is torn' })).toBe('it is torn');
    expect(aboutRun({ name: 'a', outcome: 'no end', steps: 1, deaths: 2, damage: ['a part is lost'] })).toBe(
      'no end · 1 step · 2 deaths · a part is lost'
    );
    expect(knobsOf({ name: 'a', outcome: 'ok', knobs: [['mode', 'fast', 0], ['on', true, 0], ['none', null, 1200]] })).toBe(
      'mode fast, on true, none null from step 1,200'
    );
  });

  it('draws curves within their bounds', () => {
    const bounds = boundsOf([[[0, 1], [10, 3]], [[5, 0], [20, null]]]);
    expect(bounds).toEqual([[0, 10], [0, 3]]);
    expect(pathOf([[0, 0], [5, 3], [10, 0]], bounds, 100, 30)).toBe('M0.0 30.0L0.0 30.0L50.0 0.0L100.0 30.0');
  });

  it('leaves a gap where a value is not finite', () => {
    const curve: [number, number | null][] = [[0, 0], [1, null], [2, 1]];
    expect(pathOf(curve, boundsOf([curve]), 2, 1)).toBe('M0.0 1.0L0.0 1.0M2.0 0.0L2.0 0.0');
    expect(boundsOf([[[0, null]]])).toBeNull();
    expect(pathOf([[0, null]], null, 2, 1)).toBe('');
  });

  it('draws a flat curve in the middle', () => {
    const curve: [number, number | null][] = [[0, 5], [1, 5]];
    expect(pathOf(curve, boundsOf([curve]), 10, 10)).toBe('M0.0 5.0L0.0 5.0L10.0 5.0');
  });

  it('keeps the last two runs that were chosen', () => {
    const runs = ['a', 'b', 'c'].map(name => ({ name, outcome: 'ok' as const }));
    expect(choose([], 'a', true, runs)).toEqual(['a']);
    expect(choose(['a', 'b'], 'c', true, runs)).toEqual(['b', 'c']);
    expect(choose(['b', 'c'], 'b', false, runs)).toEqual(['c']);
    expect(choose(['gone', 'c'], '', false, runs)).toEqual(['c']);
  });

  it('formats values and sizes', () => {
    expect(figure(0.123456)).toBe('0.1235');
    expect(figure(1e-9)).toBe('1e-9');
    expect(figure(null)).toBe('not finite');
    expect([0, 999, 1000, 90112, 5.07e6, 999.9e6].map(size)).toEqual(['0 B', '999 B', '1 kB', '90.1 kB', '5.07 MB', '1 GB']);
  });
});
