// Reads the messages of the kernel, without I/O or JupyterLab. `monarch_kernel/notebook/view/frames.py` is the other side, the
// view has the types, and tests of all three use the files of `tests/notebook/view/golden`.

import type { Command, Frame, FromKernel, MeshFrame, State } from '../../monarch_kernel/notebook/view/static/view.js';

export type {
  Command,
  ComparedMessage,
  ErrorFrame,
  Frame,
  FromKernel,
  KnobFrame,
  LoopFrame,
  MeshFrame,
  RankFrame,
  ReplyMessage,
  RunFrame,
  State,
  ToKernel,
  TensorsFrame,
  WaitFrame
} from '../../monarch_kernel/notebook/view/static/view.js';

/** Version of the protocol; frames of later versions are ignored. */
export const VERSION = 1;

/** Time between two `alive` messages of a browser. */
export const ALIVE_MS = 5000;

export const STATES: readonly State[] = ['starting', 'idle', 'running', 'failed', 'dead', 'stopped'];

export const COMMANDS: readonly Command[] = ['interrupt', 'heal', 'restart', 'down', 'traceback', 'stacks', 'logs'];

const KINDS: readonly unknown[] = ['frame', 'history', 'curves', 'trajectories', 'reply', 'runs', 'compared'];

/** Ranks of one mesh that died since an earlier frame. */
export interface Deaths {
  mesh: string;
  ranks: number[];
  /** The cause of death, if known. */
  why: string;
  /** When they died, or when a frame first said so, in seconds since 1970. */
  at: number;
  /** When the mesh came up, which distinguishes it from a later one with this name. */
  since: number;
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
  return before === null ? [] : (after.meshes ?? []).flatMap(mesh => deathsOf(sameMesh(before, mesh), mesh, after.at));
}

/** The names of meshes that came up since an earlier frame; none without one. */
export function newMeshes(before: Frame | null, after: Frame): string[] {
  return before === null ? [] : (after.meshes ?? []).filter(mesh => !sameMesh(before, mesh)).map(mesh => mesh.name);
}

/** Find the same mesh in a frame. A later mesh may have the same name, but another start time. */
function sameMesh(frame: Frame, mesh: MeshFrame): MeshFrame | undefined {
  return (frame.meshes ?? []).find(each => each.name === mesh.name && each.since === mesh.since);
}

/** The part of earlier deaths that still holds: the ranks that are dead, not replaced or gone with their mesh; null if none. */
export function stillDead(deaths: Deaths, now: Frame | null): Deaths | null {
  const mesh = (now?.meshes ?? []).find(each => each.name === deaths.mesh && each.since === deaths.since);
  const states = mesh ? statesOf(mesh) : [];
  const ranks = deaths.ranks.filter(rank => states[rank] === 'dead');
  return ranks.length ? { ...deaths, ranks } : null;
}

/** Formats a moment as its time of day, with the date if that is another day. */
export function moment(at: number, now = Date.now() / 1000): string {
  const date = new Date(at * 1000);
  return date.toDateString() === new Date(now * 1000).toDateString() ? date.toLocaleTimeString() : date.toLocaleString();
}

function deathsOf(before: MeshFrame | undefined, after: MeshFrame, at: number): Deaths[] {
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
  const own = after.ranks?.find(each => each.rank === ranks[0]);
  const folded = after.errors?.find(each => each.is_death);
  const why = own?.error ?? folded?.text ?? '';
  return [{ mesh: after.name, ranks, why, at: own?.error_at ?? folded?.at ?? at, since: after.since }];
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

/** The name of one of several notebooks: its file, or its whole path if another one has such a file; empty if it is the only one. */
export function notebookName(path: string, paths: string[]): string {
  const file = (each: string): string => each.slice(each.lastIndexOf('/') + 1);
  if (paths.length < 2) {
    return '';
  }
  return paths.filter(each => file(each) === file(path)).length > 1 ? path : file(path);
}

/** Names a mesh, and its notebook if that is not the only one. */
export function meshIn(mesh: string, notebook: string): string {
  return notebook ? `${mesh} in ${notebook}` : mesh;
}

/** The text of a notification about a reply, which says what it is about; most replies begin with the name of their mesh. */
export function noticeOf(title: string, text: string, mesh: string, notebook: string): string {
  if (!text.startsWith(`${mesh}:`) && !text.startsWith(`${mesh}[`)) {
    return `${title}: ${text || 'done'}`;
  }
  return notebook ? `${notebook}: ${text}` : text;
}

/** Meshes that the status item names. */
const MAX_NAMED = 2;

/** Summarise the meshes, such as `trainers: 8 ranks, 1 failed`; empty if there is none. Each trouble has the name of its mesh. */
export function summary(frame: Frame | null): string {
  const meshes = frame?.meshes ?? [];
  const of = (mesh: MeshFrame, parts: string[]): string => `${mesh.name}: ${parts.join(', ')}`;
  if (meshes.length <= MAX_NAMED) {
    return meshes.map(mesh => of(mesh, [countOf([mesh]), ...troubles(mesh)])).join(' · ');
  }
  const troubled = meshes.filter(mesh => troubles(mesh).length);
  const more = troubled.length - MAX_NAMED;
  return [
    `${meshes.length} meshes, ${countOf(meshes)}`,
    ...troubled.slice(0, MAX_NAMED).map(mesh => of(mesh, troubles(mesh))),
    ...(more > 0 ? [`troubles in ${more} more`] : [])
  ].join(' · ');
}

/** The lines about waits in collectives and about loops, each with its mesh. */
export function waitsOf(frame: Frame | null): string[] {
  return (frame?.meshes ?? []).flatMap(mesh => (mesh.waits ?? []).map(wait => `${mesh.name}: ${wait.text}`));
}

/** Whether a rank failed or died, which the status item marks. */
export function hasTrouble(frame: Frame | null): boolean {
  return (frame?.meshes ?? []).some(mesh => (mesh.counts.failed ?? 0) + (mesh.counts.dead ?? 0) > 0);
}

function countOf(meshes: MeshFrame[]): string {
  const size = meshes.reduce((sum, mesh) => sum + sizeOf(mesh), 0);
  return size === 1 ? '1 rank' : `${size} ranks`;
}

function troubles(mesh: MeshFrame): string[] {
  // Idle and running change with every cell, which would make the status bar flicker.
  const states = (['dead', 'failed', 'starting', 'stopped'] as const).filter(state => mesh.counts[state]);
  const waits = (mesh.waits ?? []).filter(({ ranks }) => ranks).map(({ ranks, missing }) => {
    const word = /^\[\d+\]$/.test(ranks) ? 'waits' : 'wait';
    return `${ranks} ${word}${missing ? ` for ${missing}` : ''}`;
  });
  return [...states.map(state => `${mesh.counts[state]} ${state}`), ...waits.slice(0, 1)];
}

/** The meshes that a cell can name. A program may name a mesh by any text; in a cell, that could be another line of code. */
export function namedMeshes(frame: Frame | null): MeshFrame[] {
  return (frame?.meshes ?? []).filter(mesh => /^[\p{L}_][\p{L}\p{N}_]*$/u.test(mesh.name));
}

/** Suggest selectors for a cell: each mesh, its halves, its first rank, or slices of its axes. */
export function selectors(frame: Frame | null): string[] {
  return namedMeshes(frame).flatMap(mesh => {
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
