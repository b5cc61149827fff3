/** The messages between the kernel and browsers; `monarch_kernel/notebook/view/frames.py` documents them. */

export type State = "starting" | "idle" | "running" | "failed" | "dead" | "stopped";
export type Command = "interrupt" | "heal" | "restart" | "down" | "traceback" | "stacks" | "logs";
export type LoopCommand = "pause" | "resume" | "step" | "stop" | "set";
export type KnobValue = number | string | boolean | null;

/** The state of one rank. Fields that have their default (0 or nothing) are omitted, here and below. */
export interface RankFrame {
  rank: number;
  state: State;
  activity?: string;
  since?: number;
  line?: string;
  waits?: string;
  said?: string;
  error?: string;
  host?: string;
  pid?: number;
  device?: string;
  rss?: number;
  cpu?: number;
  in_rate?: number;
  out_rate?: number;
  restarts?: number;
  gpu_used?: number;
  gpu_total?: number;
  gpu_use?: number;
  error_at?: number;
  late?: string;
}

/** One distinct error, and the ranks that have it; `rank` is the first of them. Of ranks that run by now, it is past. */
export interface ErrorFrame {
  text: string;
  ranks: string;
  rank: number;
  count: number;
  is_death?: boolean;
  at?: number;
  is_past?: boolean;
}

/** A wait in a collective that lasts: one line about it, the ranks that wait, and those that they wait for. */
export interface WaitFrame {
  text: string;
  ranks: string;
  missing?: string;
}

/** A knob of a loop, with its value and bounds. */
export interface KnobFrame {
  name: string;
  value: KnobValue;
  low?: number;
  high?: number;
}

/** The state of a live loop; `steps` is omitted if the loop has no end. A metric is null if it is not finite. */
export interface LoopFrame {
  request: number;
  number: number;
  where: string;
  state: "running" | "pausing" | "paused" | "stopping" | "over";
  since: number;
  step?: number;
  steps?: number;
  step_s?: number;
  knobs?: KnobFrame[];
  metrics?: [string, number | null][];
  per_s?: [string, number][];
  mfu?: number;
  took?: number;
  left_s?: number;
  loader?: string;
}

/** The state of one mesh. Above 32 ranks `states` has all states, two per character, and `ranks` only ranks to look at. */
export interface MeshFrame {
  name: string;
  axes: [string, number][];
  where: string;
  since: number;
  counts: Partial<Record<State, number>>;
  states?: string;
  ranks?: RankFrame[];
  errors?: ErrorFrame[];
  more_errors?: number;
  in_rate?: number;
  out_rate?: number;
  notes?: string[];
  loops?: LoopFrame[];
  waits?: WaitFrame[];
  links?: string;
  tensors?: TensorsFrame;
}

/** The distributed tensors on a mesh: how many, and their memory on the rank that holds most. */
export interface TensorsFrame {
  count: number;
  nbytes: number;
  /** Operations that some rank has not done. */
  outstanding?: number;
  /** The lines that made those with the most memory; ranks are empty for all. */
  lines?: [line: string, count: number, nbytes: number, ranks: string][];
  /** How many lines are omitted. */
  more?: number;
}

/** The state of all meshes at one moment, in seconds since 1970 by the clock of the kernel. */
export interface Frame {
  at: number;
  meshes?: MeshFrame[];
  seq?: number;
  version?: number;
  /** What a mesh that comes up waits for. */
  coming?: string;
}

export interface FrameMessage extends Frame {
  kind: "frame";
}

/** The bytes received and sent in each of the last 60 seconds, by name of the mesh. */
export interface HistoryMessage {
  kind: "history";
  meshes: Record<string, [number, number][]>;
}

/**
 * Steps, means, minima and maxima (empty if they equal the means); the ends: the ranks with the smallest and the largest last
 * value; one rank, if its value is not finite; or none, if all ranks logged the same value; and the ranks with the minima and
 * the maxima (empty if these are).
 */
export type Points = [
  steps: number[],
  means: (number | null)[],
  leasts: (number | null)[],
  mosts: (number | null)[],
  ends: [rank: number, value: number | null][],
  least_ranks?: number[],
  most_ranks?: number[],
];

/** The curves of a loop that ended before. */
export interface EarlierLoop {
  where: string;
  curves: Record<string, Points>;
}

/** The logged values of the loops of a mesh, by name of the metric; without `earlier`, those of the last message hold. */
export interface CurvesMessage {
  kind: "curves";
  mesh: string;
  loops: { request: number; number: number; curves: Record<string, Points> }[];
  earlier?: EarlierLoop[];
}

/** A reward is null if there is none, and a text such as `nan` if it is not finite. */
export type Sample = [rank: number, version: number | null, reward: number | string | null, prompt: string, completion: string];

/** The last samples that the ranks of a mesh have shown, the newest first, and how many they have shown. */
export interface TrajectoriesMessage {
  kind: "trajectories";
  mesh: string;
  count: number;
  samples: Sample[];
}

export interface ReplyMessage {
  kind: "reply";
  id: string;
  ok: boolean;
  text: string;
}

/** A recorded run. A run that can't be read has only `name`, `outcome` and `problem`. A value is null if it is not finite. */
export interface RunFrame {
  name: string;
  outcome: "running" | "ok" | "failed" | "interrupted" | "no end" | "unreadable";
  problem?: string;
  started?: number | null;
  took?: number | null;
  steps?: number;
  cells?: number;
  deaths?: number;
  /** The metric of the curve. */
  metric?: string;
  curve?: [step: number, value: number | null][];
  /** The last value of each metric. */
  last?: [string, number | null][];
  /** The last value of each knob, and the step from which it holds. */
  knobs?: [name: string, value: KnobValue, step: number][];
  nbytes?: number;
  damage?: string[];
}

/** The runs that the panel lists, the newest first; the answer to `runs`. */
export interface RunsMessage {
  kind: "runs";
  runs: RunFrame[];
}

/** How two runs differ; the answer to `compare`. With `problem`, they can't be compared. */
export interface ComparedMessage {
  kind: "compared";
  runs?: [string, string];
  problem?: string;
  first?: string;
  lines?: string[];
  more?: number;
  compared?: string;
  last?: [name: string, first: number | null, second: number | null][];
}

/** A message of the host of the view about its connection to the kernel: it is open, closed, or has brought nothing yet. */
export interface LinkMessage {
  kind: "opened" | "closed" | "late";
}

export type FromKernel =
  | FrameMessage | HistoryMessage | CurvesMessage | TrajectoriesMessage | ReplyMessage | RunsMessage | ComparedMessage;

export interface CommandMessage {
  kind: "command";
  id: string;
  command: Command | LoopCommand;
  mesh: string;
  ranks?: number[];
  abort?: boolean;
  /** Request and number of a loop. */
  loop?: [number, number];
  knob?: string;
  value?: KnobValue;
}

export type ToKernel =
  | { kind: "hello" }
  | { kind: "alive" }
  | { kind: "away" }
  | { kind: "runs" }
  | { kind: "compare"; runs: [string, string] }
  | CommandMessage;

export interface Options {
  /** Sends a message of the view to the kernel. */
  send: (message: ToKernel) => void;
  /** Name of the only mesh to show; all by default. */
  mesh?: string | null;
  /** Returns the time in seconds since 1970; the clock of the browser by default. */
  now?: () => number;
  /** The last known frame; the view shows it as outdated until the kernel sends one. */
  frame?: Frame | null;
}

export interface View {
  receive(message: FromKernel | LinkMessage): void;
  dispose(): void;
}

/** Draw meshes in `root`, an empty element, until `dispose()`, which leaves it empty. */
export function mount(root: HTMLElement, options: Options): View;

/** The part of an anywidget model that the view uses. */
export interface Model {
  get(name: string): any;
  on(event: string, callback: (...values: any[]) => void): void;
  off(event: string, callback: (...values: any[]) => void): void;
  send(message: ToKernel): void;
}

declare const widget: { render(context: { model: Model; el: HTMLElement }): () => void };
export default widget;
