// Reads the messages of the kernel, without I/O or JupyterLab. `monarch_kernel/notebook/view/frames.py` is the other side, the
// view has the types, and tests of all three use the files of `tests/notebook/view/golden`.

import type { Command, Frame, FromKernel, MeshFrame, State } from '../../monarch_kernel/notebook/view/static/view.js';

export type {
  Command,
  ErrorFrame,
  Frame,
  FromKernel,
  KnobFrame,
  LoopFrame,
  MeshFrame,
  RankFrame,
  ReplyMessage,
  State,
  ToKernel
} from '../../monarch_kernel/notebook/view/static/view.js';

/** Version of the protocol; frames of later versions are ignored. */
export const VERSION = 1;

/** Time between two `alive` messages of a browser. */
export const ALIVE_MS = 5000;

export const STATES: readonly State[] = ['starting', 'idle', 'running', 'failed', 'dead', 'stopped'];

export const COMMANDS: readonly Command[] = ['interrupt', 'heal', 'restart', 'down', 'traceback', 'stacks', 'logs'];

const KINDS: readonly unknown[] = ['frame', 'history', 'curves', 'reply'];

/** Ranks of one mesh that died since an earlier frame. */
export interface Deaths {
  mesh: string;
  ranks: number[];
  /** The cause of death, if known. */
  why: string;
}

/** Check a message of the kernel; null for an unknown kind, which a later version may add. */
export function readSaid(data: unknown): FromKernel | null {
  const kind = (data as { kind?: unknown } | null)?.kind;
  return KINDS.includes(kind) ? (data as FromKernel) : null;
}

/** The number of ranks of a mesh. */
export function sizeOf(mesh: MeshFrame): number {
  return mesh.axes.reduce((product, [, size]) => product * size, 1);
}

/** The states of all ranks, by flat rank. */
export function statesOf(mesh: MeshFrame): State[] {
  if (!mesh.states) {
    return (mesh.ranks ?? []).map(rank => rank.state);
  }
  const all = Array.from(mesh.states).flatMap(each => {
    const pair = parseInt(each, 36);
    return [STATES[Math.floor(pair / STATES.length)], STATES[pair % STATES.length]];
  });
  return all.slice(0, sizeOf(mesh)); // an odd number of states is packed with one more
}

/** Find ranks that died since an earlier frame; none without one, since they may have died long ago. */
export function newDeaths(before: Frame | null, after: Frame): Deaths[] {
  return before === null ? [] : (after.meshes ?? []).flatMap(mesh => deathsOf(sameMesh(before, mesh), mesh));
}

/** The names of meshes that came up since an earlier frame; none without one. */
export function newMeshes(before: Frame | null, after: Frame): string[] {
  return before === null ? [] : (after.meshes ?? []).filter(mesh => !sameMesh(before, mesh)).map(mesh => mesh.name);
}

/** Find the same mesh in a frame. A later mesh may have the same name, but another start time. */
function sameMesh(frame: Frame, mesh: MeshFrame): MeshFrame | undefined {
  return (frame.meshes ?? []).find(each => each.name === mesh.name && each.since === mesh.since);
}

function deathsOf(before: MeshFrame | undefined, after: MeshFrame): Deaths[] {
  const wasDead = before ? statesOf(before) : [];
  const restarts = (mesh: MeshFrame | undefined, rank: number): number =>
    mesh?.ranks?.find(each => each.rank === rank)?.restarts ?? 0;
  const isNew = (rank: number): boolean =>
    // A rank that was healed and died again between two frames is a new death, too.
    wasDead[rank] !== 'dead' || (!after.states && restarts(after, rank) !== restarts(before, rank));
  const ranks = statesOf(after).flatMap((state, rank) => (state === 'dead' && isNew(rank) ? [rank] : []));
  if (!ranks.length) {
    return [];
  }
  const own = after.ranks?.find(each => each.rank === ranks[0])?.error;
  const folded = after.errors?.find(each => each.is_death)?.text;
  return [{ mesh: after.name, ranks, why: own ?? folded ?? '' }];
}

/** Format ranks like the labels of output: `[0-3,7]`. */
export function formatRanks(ranks: number[]): string {
  const spans: [number, number][] = [];
  for (const rank of ranks) {
    const last = spans[spans.length - 1];
    if (last && rank === last[1] + 1) {
      last[1] = rank;
    } else {
      spans.push([rank, rank]);
    }
  }
  return `[${spans.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(',')}]`;
}

/** Summarise the meshes, such as `trainers: 8 ranks, 1 failed`; empty if there is none. */
export function summary(frame: Frame | null): string {
  const meshes = frame?.meshes ?? [];
  if (meshes.length <= 2) {
    return meshes.map(mesh => `${mesh.name}: ${ranksAndTroubles([mesh])}`).join(' · ');
  }
  return `${meshes.length} meshes: ${ranksAndTroubles(meshes)}`;
}

/** Whether a rank failed or died, which the status item marks. */
export function hasTrouble(frame: Frame | null): boolean {
  return (frame?.meshes ?? []).some(mesh => (mesh.counts.failed ?? 0) + (mesh.counts.dead ?? 0) > 0);
}

function ranksAndTroubles(meshes: MeshFrame[]): string {
  const count = (state: State): number => meshes.reduce((sum, mesh) => sum + (mesh.counts[state] ?? 0), 0);
  const size = meshes.reduce((sum, mesh) => sum + sizeOf(mesh), 0);
  // Idle and running change with every cell, which would make the status bar flicker.
  const told = (['starting', 'failed', 'dead', 'stopped'] as const).filter(count);
  return [size === 1 ? '1 rank' : `${size} ranks`, ...told.map(state => `${count(state)} ${state}`)].join(', ');
}

/** Suggest selectors for a cell: each mesh, its halves, its first rank, or slices of its axes. */
export function selectors(frame: Frame | null): string[] {
  return (frame?.meshes ?? []).flatMap(mesh => {
    const [first, ...others] = mesh.axes;
    if (!first || sizeOf(mesh) === 1) {
      return [mesh.name];
    }
    if (others.length) {
      return [mesh.name, ...mesh.axes.filter(([, size]) => size > 1).map(([axis]) => `${mesh.name}.slice(${axis}=0)`)];
    }
    const half = Math.floor(first[1] / 2);
    const halves = half > 1 ? [`${mesh.name}[0:${half}]`, `${mesh.name}[${half}:${first[1]}]`] : [`${mesh.name}[1]`];
    return [mesh.name, `${mesh.name}[0]`, ...halves];
  });
}
