import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';

import * as model from '../src/model';
import type { ErrorFrame, Frame, KnobFrame, LoopFrame, MeshFrame, RankFrame, State, TensorsFrame, WaitFrame } from '../src/model';

const python = readFileSync(new URL('../../monarch_kernel/notebook/view/frames.py', import.meta.url), 'utf8');

function golden(name: string): Frame {
  return JSON.parse(readFileSync(new URL(`../../tests/notebook/view/golden/${name}.json`, import.meta.url), 'utf8'));
}

type Kinds<T> = Record<keyof T, 'string' | 'number' | 'boolean' | 'object'>;

// The compiler asks for every field of our types here, and the tests for every field of the files.
const FRAME: Kinds<Frame> = { at: 'number', meshes: 'object', seq: 'number', version: 'number', coming: 'string' };
const MESH: Kinds<MeshFrame> = {
  name: 'string',
  axes: 'object',
  where: 'string',
  since: 'number',
  counts: 'object',
  states: 'string',
  ranks: 'object',
  errors: 'object',
  more_errors: 'number',
  in_rate: 'number',
  out_rate: 'number',
  notes: 'object',
  loops: 'object',
  waits: 'object',
  links: 'string',
  tensors: 'object'
};
const LOOP: Kinds<LoopFrame> = {
  request: 'number',
  number: 'number',
  where: 'string',
  state: 'string',
  since: 'number',
  step: 'number',
  steps: 'number',
  step_s: 'number',
  knobs: 'object',
  metrics: 'object',
  per_s: 'object',
  mfu: 'number',
  took: 'number',
  left_s: 'number',
  loader: 'number'
};
const WAIT: Kinds<WaitFrame> = { text: 'string', ranks: 'string', missing: 'string' };
const KNOB: Omit<Kinds<KnobFrame>, 'value'> = { name: 'string', low: 'number', high: 'number' };
const ERROR: Kinds<ErrorFrame> = {
  text: 'string',
  ranks: 'string',
  rank: 'number',
  count: 'number',
  is_death: 'boolean',
  at: 'number',
  is_past: 'boolean'
};
const TENSORS: Kinds<TensorsFrame> = {
  count: 'number',
  nbytes: 'number',
  outstanding: 'number',
  lines: 'object',
  more: 'number'
};
const RANK: Kinds<RankFrame> = {
  rank: 'number',
  state: 'string',
  activity: 'string',
  since: 'number',
  line: 'string',
  waits: 'string',
  said: 'string',
  error: 'string',
  host: 'string',
  pid: 'number',
  device: 'string',
  rss: 'number',
  cpu: 'number',
  in_rate: 'number',
  out_rate: 'number',
  restarts: 'number',
  gpu_used: 'number',
  gpu_total: 'number',
  gpu_use: 'number',
  error_at: 'number',
  late: 'string'
};

function check(found: object, kinds: Record<string, string>): void {
  for (const [field, value] of Object.entries(found)) {
    expect([field, typeof value]).toEqual([field, kinds[field]]);
  }
}

function mesh(states: State[], more: Partial<MeshFrame> = {}): MeshFrame {
  const counts: Partial<Record<State, number>> = {};
  states.forEach(state => (counts[state] = (counts[state] ?? 0) + 1));
  const ranks = states.map((state, rank) => ({ rank, state }));
  return { name: 't', axes: [['gpus', states.length]], where: 'local', since: 1, counts, ranks, ...more };
}

function frame(...meshes: MeshFrame[]): Frame {
  return { at: 2, meshes };
}

describe('the protocol', () => {
  it.each(['empty', 'coming', 'small', 'large', 'loops', 'tensors', 'waits'])('of %s.json is that of our types', name => {
    const found = golden(name);
    check(found, FRAME);
    for (const each of found.meshes ?? []) {
      check(each, MESH);
      each.ranks?.forEach(rank => check(rank, RANK));
      each.errors?.forEach(error => check(error, ERROR));
      each.loops?.forEach(loop => check(loop, LOOP));
      each.waits?.forEach(wait => check(wait, WAIT));
      if (each.tensors) check(each.tensors, TENSORS);
      for (const { value, ...rest } of each.loops?.flatMap(loop => loop.knobs ?? []) ?? []) {
        check(rest, KNOB);
        expect(['number', 'string', 'boolean']).toContain(typeof (value ?? ''));
      }
      Object.keys(each.counts).forEach(state => expect(model.STATES).toContain(state));
    }
  });

  it('has the numbers and words of the kernel', () => {
    const tuple = (name: string): string[] => {
      const body = new RegExp(`^${name}\\b[^\\n]*= \\((.*)\\)$`, 'm').exec(python)![1];
      return Array.from(body.matchAll(/"(\w+)"/g), found => found[1]);
    };
    expect(tuple('STATES')).toEqual(model.STATES);
    expect(tuple('COMMANDS')).toEqual(model.COMMANDS);
    expect(python).toContain(`VERSION = ${model.VERSION}\n`);
    expect(python).toContain(`ALIVE_S = ${(model.ALIVE_MS / 1000).toFixed(1)}\n`);
  });

  it('passes over what a later version may say', () => {
    expect(model.readSaid({ kind: 'weather' })).toBeNull();
    expect(model.readSaid(null)).toBeNull();
    expect(model.readSaid({ kind: 'curves', mesh: 't', loops: [] })).not.toBeNull();
    expect(model.readSaid({ kind: 'trajectories', mesh: 't', count: 0, samples: [] })).not.toBeNull();
    expect(model.readSaid({ kind: 'frame', at: 1 })).toEqual({ kind: 'frame', at: 1 });
  });
});

describe('states', () => {
  it('of many ranks are unpacked, and agree with the counts', () => {
    const [many] = golden('large').meshes!;
    const states = model.statesOf(many);
    expect(states.length).toBe(model.sizeOf(many));
    model.STATES.forEach(state => expect(states.filter(each => each === state).length).toBe(many.counts[state]));
    expect(states.slice(92)).toEqual(['running', 'failed', 'dead', 'stopped', 'starting', 'idle', 'running']);
  });

  it('of few ranks are those of the ranks', () => {
    expect(model.statesOf(golden('small').meshes![0])).toEqual(['running', 'failed', 'dead', 'starting']);
  });
});

describe('the summary', () => {
  it('tells meshes, ranks and troubles', () => {
    expect(model.summary(null)).toBe('');
    expect(model.summary(golden('empty'))).toBe('');
    expect(model.summary(frame(mesh(['idle'])))).toBe('t: 1 rank');
    const trainers = mesh([...Array<State>(7).fill('running'), 'failed'], { name: 'trainers' });
    expect(model.summary(frame(trainers))).toBe('trainers: 8 ranks, 1 failed');
    expect(model.summary(golden('small'))).toBe(
      'trainers: 4 ranks, 1 dead, 1 failed, 1 starting · generators: 4 ranks, 2 dead'
    );
  });

  it('marks trouble', () => {
    expect(model.hasTrouble(null)).toBe(false);
    expect(model.hasTrouble(frame(mesh(['idle', 'running', 'starting', 'stopped'])))).toBe(false);
    expect(model.hasTrouble(frame(mesh(['idle', 'failed'])))).toBe(true);
    expect(model.hasTrouble(frame(mesh(['dead'])))).toBe(true);
  });
});

describe('deaths', () => {
  it('are new once', () => {
    const before = frame(mesh(['idle', 'running']));
    const after = frame(mesh(['idle', 'dead'], { errors: [{ text: 'SIGKILL', ranks: '[1]', rank: 1, count: 1, is_death: true }] }));
    expect(model.newDeaths(before, after)).toEqual([{ mesh: 't', ranks: [1], why: 'SIGKILL', at: 2, since: 1 }]);
    expect(model.newDeaths(after, after)).toEqual([]);
  });

  it('of the first frame are old', () => {
    expect(model.newDeaths(null, frame(mesh(['dead'])))).toEqual([]);
  });

  it('are distinguished by the mesh that had the name', () => {
    const after = frame(mesh(['dead'], { since: 5 }));
    expect(model.newDeaths(frame(mesh(['dead'])), after)).toHaveLength(1);
  });

  it('have the time of the rank, or of the error that large meshes have', () => {
    const alive = frame(mesh(['idle']));
    const [own] = model.newDeaths(alive, frame(mesh(['dead'], { ranks: [{ rank: 0, state: 'dead', error_at: 1.5 }] })));
    expect(own.at).toBe(1.5);
    const errors = [{ text: 'SIGKILL', ranks: '[0]', rank: 0, count: 1, is_death: true, at: 1.7 }];
    expect(model.newDeaths(alive, frame(mesh(['dead'], { errors })))[0].at).toBe(1.7);
  });

  it('hold until the ranks are replaced or the mesh is gone', () => {
    const [deaths] = model.newDeaths(frame(mesh(['idle', 'idle'])), frame(mesh(['dead', 'dead'])));
    expect(model.stillDead(deaths, frame(mesh(['dead', 'dead'])))?.ranks).toEqual([0, 1]);
    expect(model.stillDead(deaths, frame(mesh(['starting', 'dead'])))?.ranks).toEqual([1]);
    expect(model.stillDead(deaths, frame(mesh(['starting', 'idle'])))).toBeNull();
    expect(model.stillDead(deaths, frame(mesh(['dead', 'dead'], { since: 5 })))).toBeNull();
    expect(model.stillDead(deaths, frame())).toBeNull();
    expect(model.stillDead(deaths, null)).toBeNull();
  });

  it('come again after a rank was healed', () => {
    const dead = (restarts: number): Frame => frame(mesh(['dead'], { ranks: [{ rank: 0, state: 'dead', restarts }] }));
    expect(model.newDeaths(dead(0), dead(1))).toHaveLength(1);
    expect(model.newDeaths(dead(1), dead(1))).toEqual([]);
  });

  it('are found among many', () => {
    const large = golden('large');
    const alive: Frame = { at: 1, meshes: [{ ...large.meshes![0], states: '0'.repeat(50), counts: { starting: 99 } }] };
    const [found] = model.newDeaths(alive, large);
    expect(found.ranks).toHaveLength(16);
    expect(found.ranks[0]).toBe(4);
    // Of many ranks a frame has only those that need attention most: one that is missing there is not healed.
    const fewer: Frame = { ...large, meshes: [{ ...large.meshes![0], ranks: [{ rank: 94, state: 'dead', restarts: 1 }] }] };
    expect(model.newDeaths(large, fewer)).toEqual([]);
  });
});

it('new meshes are those that the frame before had not', () => {
  expect(model.newMeshes(null, frame(mesh(['idle'])))).toEqual([]);
  expect(model.newMeshes(frame(), frame(mesh(['idle'])))).toEqual(['t']);
  expect(model.newMeshes(frame(mesh(['idle'])), frame(mesh(['dead'])))).toEqual([]);
});

it('the summary names the ranks of a wait', () => {
  const waits = (ranks: string, missing: string): Frame =>
    frame(mesh(['running', 'running', 'running'], { waits: [{ text: 'long', ranks, missing }] }));
  expect(model.summary(waits('[0,2]', '[1]'))).toBe('t: 3 ranks, [0,2] wait for [1]');
  expect(model.summary(waits('[0]', '[1-2]'))).toBe('t: 3 ranks, [0] waits for [1-2]');
  expect(model.summary(waits('[0-2]', ''))).toBe('t: 3 ranks, [0-2] wait');
  expect(model.waitsOf(waits('[0]', ''))).toEqual(['t: long']);
  expect(model.waitsOf(null)).toEqual([]);
});

it('the summary of many meshes names those with troubles', () => {
  const named = (name: string, state: State): MeshFrame => mesh([state], { name });
  const meshes = ['a', 'b', 'c', 'd'].map(name => named(name, 'idle'));
  expect(model.summary(frame(...meshes))).toBe('4 meshes, 4 ranks');
  expect(model.summary(frame(...meshes, named('e', 'failed')))).toBe('5 meshes, 5 ranks · e: 1 failed');
  const bad = ['a', 'b', 'c'].map(name => named(name, 'dead'));
  expect(model.summary(frame(...bad))).toBe('3 meshes, 3 ranks · a: 1 dead · b: 1 dead · troubles in 1 more');
});

it('ranks are written as ranges', () => {
  expect(model.formatRanks([0, 1, 2, 3, 7])).toBe('[0-3,7]');
  expect(model.formatRanks([5])).toBe('[5]');
});

it('no mesh whose name could be code is offered', () => {
  const names = ['x\nimport os', 'a b', 'a;b', '', '1a', 'a\u202eb', 'größe', 't_1'];
  expect(model.selectors(frame(...names.map(name => mesh(['idle'], { name }))))).toEqual(['größe', 't_1']);
});

it('selectors are offered by mesh', () => {
  expect(model.selectors(frame(mesh(Array(8).fill('idle'))))).toEqual(['t', 't[0]', 't[0:4]', 't[4:8]']);
  expect(model.selectors(frame(mesh(['idle', 'idle'])))).toEqual(['t', 't[0]', 't[1]']);
  expect(model.selectors(frame(mesh(['idle'])))).toEqual(['t']);
  const axes: [string, number][] = [
    ['dp', 2],
    ['tp', 2]
  ];
  expect(model.selectors(frame(mesh(Array(4).fill('idle'), { axes })))).toEqual(['t', 't.slice(dp=0)', 't.slice(tp=0)']);
});

describe('what notices and the status item speak of', () => {
  it('names notebooks only where there are several, by their file where that is enough', () => {
    expect(model.notebookName('runs/a.ipynb', ['runs/a.ipynb'])).toBe('');
    expect(model.notebookName('runs/a.ipynb', ['runs/a.ipynb', 'b.ipynb'])).toBe('a.ipynb');
    expect(model.notebookName('runs/a.ipynb', ['runs/a.ipynb', 'a.ipynb', 'b.ipynb'])).toBe('runs/a.ipynb');
  });

  it('names the mesh of a reply once, and the notebook', () => {
    expect(model.noticeOf('Heal (t)', 't: rank 1 replaced', 't', '')).toBe('t: rank 1 replaced');
    expect(model.noticeOf('Heal (t in a.ipynb)', 't: rank 1 replaced', 't', 'a.ipynb')).toBe('a.ipynb: t: rank 1 replaced');
    expect(model.noticeOf('Heal (t)', 'tp: no', 't', '')).toBe('Heal (t): tp: no');
    expect(model.noticeOf('Heal (t in a.ipynb)', '', 't', 'a.ipynb')).toBe('Heal (t in a.ipynb): done');
    expect(model.meshIn('t', '')).toBe('t');
  });
});
