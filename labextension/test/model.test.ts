import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';

import * as model from '../src/model';
import type { ErrorFrame, Frame, KnobFrame, LoopFrame, MeshFrame, RankFrame, State } from '../src/model';

const python = readFileSync(new URL('../../monarch_kernel/notebook/view/frames.py', import.meta.url), 'utf8');

function golden(name: string): Frame {
  return JSON.parse(readFileSync(new URL(`../../tests/notebook/view/golden/${name}.json`, import.meta.url), 'utf8'));
}

type Kinds<T> = Record<keyof T, 'string' | 'number' | 'boolean' | 'object'>;

// The compiler asks for every field of our types here, and the tests for every field of the files.
const FRAME: Kinds<Frame> = { at: 'number', meshes: 'object', seq: 'number', version: 'number' };
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
  loops: 'object'
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
  mfu: 'number'
};
const KNOB: Omit<Kinds<KnobFrame>, 'value'> = { name: 'string', low: 'number', high: 'number' };
const ERROR: Kinds<ErrorFrame> = {
  text: 'string',
  ranks: 'string',
  rank: 'number',
  count: 'number',
  is_death: 'boolean'
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
  gpu_use: 'number'
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
  it.each(['empty', 'small', 'large', 'loops'])('of %s.json is that of our types', name => {
    const found = golden(name);
    check(found, FRAME);
    for (const each of found.meshes ?? []) {
      check(each, MESH);
      each.ranks?.forEach(rank => check(rank, RANK));
      each.errors?.forEach(error => check(error, ERROR));
      each.loops?.forEach(loop => check(loop, LOOP));
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
      'trainers: 4 ranks, 1 starting, 1 failed, 1 dead · generators: 4 ranks, 2 dead'
    );
  });

  it('sums up more than two', () => {
    const three = ['a', 'b', 'c'].map(name => mesh(['idle', 'dead'], { name }));
    expect(model.summary(frame(...three))).toBe('3 meshes: 6 ranks, 3 dead');
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
    expect(model.newDeaths(before, after)).toEqual([{ mesh: 't', ranks: [1], why: 'SIGKILL' }]);
    expect(model.newDeaths(after, after)).toEqual([]);
  });

  it('of the first frame are old', () => {
    expect(model.newDeaths(null, frame(mesh(['dead'])))).toEqual([]);
  });

  it('are told apart by the mesh that had the name', () => {
    const after = frame(mesh(['dead'], { since: 5 }));
    expect(model.newDeaths(frame(mesh(['dead'])), after)).toHaveLength(1);
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
    // Of many ranks only those that need attention most are told: one that is missing there was not healed for that.
    const fewer: Frame = { ...large, meshes: [{ ...large.meshes![0], ranks: [{ rank: 94, state: 'dead', restarts: 1 }] }] };
    expect(model.newDeaths(large, fewer)).toEqual([]);
  });
});

it('new meshes are those that the frame before had not', () => {
  expect(model.newMeshes(null, frame(mesh(['idle'])))).toEqual([]);
  expect(model.newMeshes(frame(), frame(mesh(['idle'])))).toEqual(['t']);
  expect(model.newMeshes(frame(mesh(['idle'])), frame(mesh(['dead'])))).toEqual([]);
});

it('ranks are written as ranges', () => {
  expect(model.formatRanks([0, 1, 2, 3, 7])).toBe('[0-3,7]');
  expect(model.formatRanks([5])).toBe('[5]');
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
