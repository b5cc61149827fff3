import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { Connection, Link, Port, RETRY_MS, TARGET } from '../src/connection';
import { ALIVE_MS, FromKernel, ToKernel } from '../src/model';

/** A kernel that keeps what it receives, and answers once it is up. */
class FakeKernel implements Port {
  sent: { type: string; content: Record<string, unknown> }[] = [];
  isUp = true;
  isAlive = true;
  listeners = 0;

  listen(commId: string, received: (data: unknown) => void, closed: () => void): void {
    if (this.comm !== commId) {
      this.comm = commId;
      this.listeners += 1;
      this.received = received;
      this.closed = closed;
    }
  }

  send(type: 'comm_open' | 'comm_msg' | 'comm_close', content: Record<string, unknown>): boolean {
    if (!this.isAlive) {
      return false;
    }
    this.sent.push({ type, content });
    if (this.isUp && (content.data as { kind?: string }).kind === 'hello') {
      this.say({ kind: 'history', meshes: {} });
      this.say({ kind: 'frame', at: 1 });
    }
    return true;
  }

  say(said: FromKernel | { kind: string }): void {
    this.received(said);
  }

  /** What JupyterLab does with its comms when a kernel restarts. */
  dropComms(): void {
    this.comm = '';
    this.received = () => undefined;
  }

  count(kind: string): number {
    return this.sent.filter(each => each.type === kind || (each.content.data as { kind?: string }).kind === kind).length;
  }

  closed = (): void => undefined;
  private received: (data: unknown) => void = () => undefined;
  private comm = '';
}

let kernel: FakeKernel;
let connection: Connection;
let links: Link[];

function connect(): void {
  let comms = 0;
  connection = new Connection(kernel, () => `id${(comms += 1)}`);
  links = [];
  connection.linkChanged.connect((_, link) => links.push(link));
}

beforeEach(() => {
  vi.useFakeTimers();
  kernel = new FakeKernel();
});

afterEach(() => {
  connection.dispose();
  vi.useRealTimers();
});

describe('opening', () => {
  it('is done once where it is answered', () => {
    connect();
    expect(connection.link).toBe('open');
    expect(kernel.sent[0]).toEqual({ type: 'comm_open', content: { comm_id: 'id1', target_name: TARGET, data: {} } });
    vi.advanceTimersByTime(4 * RETRY_MS);
    expect(kernel.count('comm_open')).toBe(1);
  });

  it('is repeated, with the same id, until something is received', () => {
    kernel.isUp = false;
    connect();
    vi.advanceTimersByTime(3 * RETRY_MS);
    expect(kernel.count('comm_open')).toBe(4);
    expect(kernel.listeners).toBe(1);
    expect(links).toEqual([]);
    kernel.isUp = true;
    vi.advanceTimersByTime(RETRY_MS);
    expect(links).toEqual(['open']);
    expect(connection.frame).toEqual({ kind: 'frame', at: 1 });
  });

  it('is done again after a restart, in which comms are lost', () => {
    connect();
    kernel.isUp = false;
    kernel.dropComms();
    connection.reset();
    expect(connection.frame).toBeNull();
    vi.advanceTimersByTime(RETRY_MS);
    kernel.isUp = true;
    vi.advanceTimersByTime(RETRY_MS);
    expect(links).toEqual(['connecting', 'open']);
    expect(kernel.listeners).toBe(2);
  });

  it('is done again where the kernel closes the comm, with another id', () => {
    connect();
    kernel.closed();
    expect(connection.frame).not.toBeNull();
    vi.advanceTimersByTime(RETRY_MS);
    expect(links).toEqual(['connecting', 'open']);
    const opened = kernel.sent.filter(each => each.type === 'comm_open').map(each => each.content.comm_id);
    expect(opened).toEqual(['id1', 'id2']);
  });

  it('ends with the kernel, and begins again with the next', () => {
    connect();
    kernel.isAlive = false;
    connection.close();
    vi.advanceTimersByTime(10 * RETRY_MS);
    expect(connection.link).toBe('closed');
    expect(kernel.count('comm_open')).toBe(1);
    kernel.isAlive = true;
    connection.reset();
    vi.advanceTimersByTime(RETRY_MS);
    expect(connection.link).toBe('open');
  });
});

describe('silence', () => {
  it('of a kernel where nothing changes is no loss', () => {
    connect();
    vi.advanceTimersByTime(120_000);
    expect(links).toEqual([]);
    expect(kernel.count('comm_open')).toBe(1);
    expect(kernel.count('hello')).toBeLessThanOrEqual(7);
  });

  it('of one that does not answer is reported, and ends with its next message', () => {
    connect();
    kernel.isUp = false;
    vi.advanceTimersByTime(19_000);
    expect(kernel.count('comm_open')).toBe(1);
    vi.advanceTimersByTime(10_000);
    expect(links).toEqual(['connecting']);
    kernel.say({ kind: 'frame', at: 2 } as FromKernel);
    expect(links).toEqual(['connecting', 'open']);
  });

  it('is kept by what is not understood', () => {
    kernel.isUp = false;
    connect();
    kernel.say({ kind: 'weather' });
    expect(connection.link).toBe('connecting');
  });
});

describe('presence', () => {
  it('is said while the page is looked at, by the connection alone', () => {
    connect();
    connection.say({ kind: 'away' });
    connection.say({ kind: 'alive' });
    expect(kernel.count('away') + kernel.count('alive')).toBe(0);
    vi.advanceTimersByTime(4 * ALIVE_MS);
    const alive = kernel.count('alive');
    expect(alive).toBeGreaterThanOrEqual(3);
    connection.isWatched = false;
    expect(kernel.count('away')).toBe(1);
    vi.advanceTimersByTime(120_000);
    expect(kernel.count('alive')).toBe(alive);
    expect(links).toEqual([]);
  });

  it('begins anew with a hello', () => {
    connect();
    connection.isWatched = false;
    connection.isWatched = true;
    connection.isWatched = true;
    expect(kernel.count('hello')).toBe(2);
  });
});

describe('commands', () => {
  it('are answered by their reply', async () => {
    connect();
    const reply = connection.command('interrupt', 't', { ranks: [1] });
    const { id, ...asked } = kernel.sent.at(-1)!.content.data as ToKernel & { id: string };
    expect(asked).toEqual({ kind: 'command', command: 'interrupt', mesh: 't', ranks: [1] });
    kernel.say({ kind: 'reply', id: 'of somebody else', ok: false, text: '' });
    kernel.say({ kind: 'reply', id, ok: true, text: 'done' });
    expect((await reply).text).toBe('done');
  });

  it('fail with the kernel', async () => {
    connect();
    const reply = connection.command('heal', 't');
    connection.reset();
    await expect(reply).rejects.toThrow('restarts');
    kernel.isAlive = false;
    await expect(connection.command('heal', 't')).rejects.toThrow('not connected');
  });
});

it('a frame comes with the one before it', () => {
  connect();
  const pairs: unknown[] = [];
  connection.received.connect((sender, { before }) => pairs.push([before?.at, sender.frame?.at]));
  kernel.say({ kind: 'frame', at: 2 } as FromKernel);
  kernel.say({ kind: 'frame', at: 3 } as FromKernel);
  expect(pairs).toEqual([
    [1, 2],
    [2, 3]
  ]);
});

it('a frame of a later version is passed on, and not kept', () => {
  connect();
  const received: FromKernel[] = [];
  connection.received.connect((_, { said }) => received.push(said));
  kernel.say({ kind: 'frame', at: 2, version: 2 } as FromKernel);
  expect(received).toHaveLength(1);
  expect(connection.frame).toBeNull();
});

it('nothing is sent after the end but that it is the end', () => {
  connect();
  connection.dispose();
  const { length } = kernel.sent;
  expect(kernel.sent.at(-1)!.type).toBe('comm_close');
  vi.advanceTimersByTime(60_000);
  expect(kernel.sent).toHaveLength(length);
});
