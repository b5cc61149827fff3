/** What the kernel and browsers say to each other; the words for it are in `monarch_kernel/notebook/view/frames.py`. */

export type State = "starting" | "idle" | "running" | "failed" | "dead" | "stopped";
export type Command = "interrupt" | "heal" | "restart" | "down" | "traceback" | "stacks" | "logs";
export type LoopCommand = "pause" | "resume" | "step" | "stop" | "set";
export type KnobValue = number | string | boolean | null;

/** One rank. Fields that have their default (0 or nothing) are left out, here and below. */
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
}

/** One error, of all ranks that have it; `rank` is the first of them. */
export interface ErrorFrame {
  text: string;
  ranks: string;
  rank: number;
  count: number;
  is_death?: boolean;
}

/** A knob of a loop, and between what it may be. */
export interface KnobFrame {
  name: string;
  value: KnobValue;
  low?: number;
  high?: number;
}

/** A loop that is steered; `steps` is left out where it has no end. A metric is null that is no finite number. */
export interface LoopFrame {
  request: number;
  number: number;
  where: string;
  state: "running" | "paused" | "over";
  since: number;
  step?: number;
  steps?: number;
  step_s?: number;
  knobs?: KnobFrame[];
  metrics?: [string, number | null][];
  per_s?: [string, number][];
  mfu?: number;
}

/** One mesh. Above 32 ranks `states` has the states of all, two in a character, and `ranks` those to look at. */
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
}

/** All that is known at one moment, in seconds since 1970 by the clock of the kernel. */
export interface Frame {
  at: number;
  meshes?: MeshFrame[];
  seq?: number;
  version?: number;
}

export interface FrameMessage extends Frame {
  kind: "frame";
}

/** For each of the last 60 seconds the bytes that came in and went out, by name of the mesh. */
export interface HistoryMessage {
  kind: "history";
  meshes: Record<string, [number, number][]>;
}

/**
 * Steps, means, leasts and mosts (none where they are the means), and two ranks with what they have logged last: the least and
 * the greatest; or one, which has logged no finite number.
 */
export type Points = [
  steps: number[],
  means: (number | null)[],
  leasts: (number | null)[],
  mosts: (number | null)[],
  ends: [rank: number, value: number | null][],
];

/** What was logged in the loops of a mesh, by name of the metric. */
export interface CurvesMessage {
  kind: "curves";
  mesh: string;
  loops: { request: number; number: number; curves: Record<string, Points> }[];
}

export interface ReplyMessage {
  kind: "reply";
  id: string;
  ok: boolean;
  text: string;
}

/** What the host of the view says, not the kernel: the way to the kernel is there, or is gone, or nothing has come by it. */
export interface LinkMessage {
  kind: "opened" | "closed" | "late";
}

export type FromKernel = FrameMessage | HistoryMessage | CurvesMessage | ReplyMessage;

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

export type ToKernel = { kind: "hello" } | { kind: "alive" } | { kind: "away" } | CommandMessage;

export interface Options {
  /** Takes what the view says to the kernel. */
  send: (message: ToKernel) => void;
  /** Name of the only mesh to show; all if left out. */
  mesh?: string | null;
  /** Seconds since 1970; by the clock of the browser if left out. */
  now?: () => number;
  /** The last that was known, drawn as such until the kernel is heard. */
  frame?: Frame | null;
}

export interface View {
  receive(message: FromKernel | LinkMessage): void;
  dispose(): void;
}

/** Draw meshes in `root`, an empty element, until `dispose()`, which leaves it empty. */
export function mount(root: HTMLElement, options: Options): View;

/** What anywidget needs of its model. */
export interface Model {
  get(name: string): any;
  on(event: string, callback: (...values: any[]) => void): void;
  off(event: string, callback: (...values: any[]) => void): void;
  send(message: ToKernel): void;
}

declare const widget: { render(context: { model: Model; el: HTMLElement }): () => void };
export default widget;
