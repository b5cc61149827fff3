// The connection of a browser to one kernel: a comm that is opened repeatedly until the kernel answers. This file does not use
// JupyterLab; `kernel.ts` has the port.
//
// *Theory of operation.* Messages to the kernel use the control channel, which a kernel serves while a cell runs; messages from
// the kernel arrive on the comm. A kernel that starts or restarts drops a `comm_open` silently, so the connection repeats it
// with the same id until it receives something; a kernel treats repeated ones as one. A kernel also sends nothing while nothing
// changes, so after `QUIET_MS` the connection sends another `hello`. If that has no answer, the kernel was restarted from
// another tab, or the connection was cut.

import { ISignal, Signal } from '@lumino/signaling';

import { ALIVE_MS, Command, Frame, FromKernel, ReplyMessage, ToKernel, VERSION, readSaid } from './model';

/** The part of a kernel that a connection uses. */
export interface Port {
  /** Listen to the comm with this id. Called before each attempt to open; repeated calls have no effect while it listens. */
  listen(commId: string, received: (data: unknown) => void, closed: () => void): void;
  /** Send on the control channel; false if the kernel can't receive anything now. */
  send(type: 'comm_open' | 'comm_msg' | 'comm_close', content: Record<string, unknown>): boolean;
}

/** `connecting`: the kernel has sent nothing yet, or no longer answers. `closed`: there is no kernel. */
export type Link = 'connecting' | 'open' | 'closed';

export const TARGET = 'monarch_kernel.view';

/** Time between two attempts to open. */
export const RETRY_MS = 2000;

const QUIET_MS = 20_000;
const LOST_MS = QUIET_MS + 3 * RETRY_MS;

/** Messages of the view that are not forwarded: the connection itself reports whether the page is visible. */
const PRESENCE = new Set(['alive', 'away']);

export interface Received {
  readonly said: FromKernel;
  /** The previous frame, to find changes. */
  readonly before: Frame | null;
}

interface Pending {
  resolve: (reply: ReplyMessage) => void;
  reject: (error: Error) => void;
}

export class Connection {
  constructor(
    private readonly port: Port,
    private readonly newId: () => string,
    private readonly now: () => number = Date.now
  ) {
    this.commId = newId();
    this.open();
    this.timer = setInterval(() => this.beat(), RETRY_MS);
  }

  /** The state of the connection. */
  get link(): Link {
    return this.currentLink;
  }

  /** The last frame; null if the current kernel process has sent none. */
  get frame(): Frame | null {
    return this.lastFrame;
  }

  /** Emitted when the state of the connection changes. */
  get linkChanged(): ISignal<this, Link> {
    return this.linkSignal;
  }

  /** Emitted for every message of the kernel. */
  get received(): ISignal<this, Received> {
    return this.receivedSignal;
  }

  /** Send a message of the view to the kernel. */
  say(message: ToKernel): void {
    if (!PRESENCE.has(message.kind)) {
      this.tell(message);
    }
  }

  /** Run a command; the promise is rejected if the connection is lost before the reply. */
  command(command: Command, mesh: string, more: { ranks?: number[]; abort?: boolean } = {}): Promise<ReplyMessage> {
    this.commands += 1;
    const id = `lab-${this.commId}-${this.commands}`;
    return new Promise((resolve, reject) => {
      if (this.tell({ kind: 'command', id, command, mesh, ...more })) {
        this.pending.set(id, { resolve, reject });
      } else {
        reject(new Error('the kernel is not connected'));
      }
    });
  }

  /** Whether the page is visible: the kernel sends no frames to hidden pages. */
  set isWatched(watched: boolean) {
    if (watched !== this.watched) {
      this.watched = watched;
      this.receivedAt = this.now(); // silence was expected while hidden
      this.tell({ kind: watched ? 'hello' : 'away' });
    }
  }

  /** The kernel restarts, and no longer knows the comm. */
  reset(): void {
    this.forget('the kernel restarts');
    this.become('connecting');
  }

  /** The kernel is dead. */
  close(): void {
    this.forget('the kernel has ended');
    this.become('closed');
  }

  dispose(): void {
    clearInterval(this.timer);
    this.port.send('comm_close', { comm_id: this.commId, data: {} });
    this.forget('the notebook was closed');
    Signal.clearData(this);
  }

  private beat(): void {
    if (this.currentLink === 'closed') {
      return;
    }
    const silence = this.now() - this.receivedAt;
    if (this.currentLink === 'connecting') {
      this.open();
    } else if (this.watched && silence >= QUIET_MS) {
      this.tell({ kind: 'hello' });
      if (silence >= LOST_MS) {
        this.fail('the kernel does not answer');
        this.become('connecting'); // keep the last frame: the kernel may only be busy
      }
    }
    if (this.watched && this.now() - this.aliveAt >= ALIVE_MS) {
      this.tell({ kind: 'alive' });
    }
  }

  private open(): void {
    this.port.listen(
      this.commId,
      data => this.take(data),
      () => this.leave()
    );
    if (this.port.send('comm_open', { comm_id: this.commId, target_name: TARGET, data: {} })) {
      this.tell({ kind: this.watched ? 'hello' : 'away' });
    }
  }

  /** The kernel has closed the comm: continue with a new id. */
  private leave(): void {
    this.port.send('comm_close', { comm_id: this.commId, data: {} });
    this.commId = this.newId();
    this.fail('the kernel has closed the connection');
    this.become('connecting');
  }

  private tell(message: ToKernel): boolean {
    this.aliveAt = this.now();
    return this.port.send('comm_msg', { comm_id: this.commId, data: message });
  }

  private take(data: unknown): void {
    const said = readSaid(data);
    if (!said) {
      return;
    }
    this.receivedAt = this.now();
    this.become('open');
    const before = this.lastFrame;
    if (said.kind === 'frame') {
      // Frames of a later version are not understood here; the view reports it.
      this.lastFrame = (said.version ?? VERSION) <= VERSION ? said : null;
    } else if (said.kind === 'reply') {
      this.pending.get(said.id)?.resolve(said);
      this.pending.delete(said.id);
    }
    this.receivedSignal.emit({ said, before });
  }

  private forget(why: string): void {
    this.lastFrame = null;
    this.fail(why);
  }

  private fail(why: string): void {
    const waiting = Array.from(this.pending.values());
    this.pending.clear();
    waiting.forEach(each => each.reject(new Error(why)));
  }

  private become(link: Link): void {
    if (link !== this.currentLink) {
      this.currentLink = link;
      this.linkSignal.emit(link);
    }
  }

  private readonly timer: ReturnType<typeof setInterval>;
  private readonly linkSignal = new Signal<this, Link>(this);
  private readonly receivedSignal = new Signal<this, Received>(this);
  private readonly pending = new Map<string, Pending>();
  private commId: string;
  private currentLink: Link = 'connecting';
  private lastFrame: Frame | null = null;
  private watched = true;
  private commands = 0;
  private receivedAt = 0;
  private aliveAt = 0;
}
