// One kernel, from a browser: a comm that is opened again until it is answered. No JupyterLab here; `kernel.ts` has the port.
//
// *Theory of operation.* What is sent goes by the control channel, which a kernel answers while a cell runs; what comes is
// taken by the comm. A `comm_open` that meets a kernel which starts, or restarts, is lost without a word, so it is repeated
// with the same id until something is heard: a kernel that gets several takes them for one. Where nothing changes nothing is
// said, either: after `QUIET_MS` the kernel is greeted again, and does not answer if it was restarted from another tab, or the
// connection was cut.

import { ISignal, Signal } from '@lumino/signaling';

import { ALIVE_MS, Command, Frame, FromKernel, ReplyMessage, ToKernel, VERSION, readSaid } from './model';

/** What a connection needs of a kernel. */
export interface Port {
  /** Take what the kernel says to the comm with this id. Called before each opening: once is enough where that still holds. */
  listen(commId: string, heard: (data: unknown) => void, closed: () => void): void;
  /** Send by the control channel; false if the kernel can't be sent anything now. */
  send(type: 'comm_open' | 'comm_msg' | 'comm_close', content: Record<string, unknown>): boolean;
}

/** `connecting`: nothing was heard yet, or no more. `closed`: there is no kernel. */
export type Link = 'connecting' | 'open' | 'closed';

export const TARGET = 'monarch_kernel.view';

/** Between two attempts to open. */
export const RETRY_MS = 2000;

const QUIET_MS = 20_000;
const LOST_MS = QUIET_MS + 3 * RETRY_MS;

/** What the view sends is for the kernel as it is, but for these: the connection says whether anybody looks. */
const PRESENCE = new Set(['alive', 'away']);

export interface Heard {
  readonly said: FromKernel;
  /** The frame before, which tells what is new in this one. */
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

  /** Whether the kernel is heard. */
  get link(): Link {
    return this.currentLink;
  }

  /** The last frame; null if there is none from the kernel as it runs now. */
  get frame(): Frame | null {
    return this.lastFrame;
  }

  /** The kernel is heard, is not heard any more, or ended. */
  get linkChanged(): ISignal<this, Link> {
    return this.linkSignal;
  }

  /** Everything that the kernel says. */
  get heard(): ISignal<this, Heard> {
    return this.heardSignal;
  }

  /** Ask the kernel something on behalf of the view. */
  say(message: ToKernel): void {
    if (!PRESENCE.has(message.kind)) {
      this.tell(message);
    }
  }

  /** Have something done; the promise is rejected where the kernel is lost before it answers. */
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

  /** Whether the page is looked at: the kernel does not draw for one that is hidden. */
  set isWatched(watched: boolean) {
    if (watched !== this.watched) {
      this.watched = watched;
      this.heardAt = this.now(); // nothing was to be heard meanwhile
      this.tell({ kind: watched ? 'hello' : 'away' });
    }
  }

  /** The kernel begins anew, and knows nothing of the comm. */
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
    const silence = this.now() - this.heardAt;
    if (this.currentLink === 'connecting') {
      this.open();
    } else if (this.watched && silence >= QUIET_MS) {
      this.tell({ kind: 'hello' });
      if (silence >= LOST_MS) {
        this.fail('the kernel does not answer');
        this.become('connecting'); // with the last frame, for it may only be busy
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

  /** The kernel has closed the comm, whose id is then worth nothing. */
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
    this.heardAt = this.now();
    this.become('open');
    const before = this.lastFrame;
    if (said.kind === 'frame') {
      // What a frame of a later version means is not known here; the view says so.
      this.lastFrame = (said.version ?? VERSION) <= VERSION ? said : null;
    } else if (said.kind === 'reply') {
      this.pending.get(said.id)?.resolve(said);
      this.pending.delete(said.id);
    }
    this.heardSignal.emit({ said, before });
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
  private readonly heardSignal = new Signal<this, Heard>(this);
  private readonly pending = new Map<string, Pending>();
  private commId: string;
  private currentLink: Link = 'connecting';
  private lastFrame: Frame | null = null;
  private watched = true;
  private commands = 0;
  private heardAt = 0;
  private aliveAt = 0;
}
