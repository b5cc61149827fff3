// The connections of all open notebooks that use monarch_kernel.

import { ISessionContext } from '@jupyterlab/apputils';
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { Kernel } from '@jupyterlab/services';
import { UUID } from '@lumino/coreutils';
import { ISignal, Signal } from '@lumino/signaling';

import { Connection, Received } from './connection';
import { isOurs, portOf } from './kernel';
import { notebookName } from './model';

/** A notebook, and the connection to its kernel. */
export interface Entry {
  readonly notebook: NotebookPanel;
  readonly kernel: Kernel.IKernelConnection;
  readonly connection: Connection;
}

export interface ReceivedBy extends Received {
  readonly entry: Entry;
}

export class Hub {
  constructor(private readonly tracker: INotebookTracker) {
    tracker.forEach(notebook => this.watch(notebook));
    tracker.widgetAdded.connect((_, notebook) => this.watch(notebook));
    tracker.currentChanged.connect(() => this.changedSignal.emit());
    document.addEventListener('visibilitychange', () => {
      this.entries.forEach(entry => (entry.connection.isWatched = !document.hidden));
    });
  }

  /** The entries of all notebooks, the current notebook first. */
  get entries(): Entry[] {
    const all = Array.from(this.byNotebook.values());
    const { front } = this;
    return front ? [front, ...all.filter(each => each !== front)] : all;
  }

  /** The entry of the current notebook; null if it uses another kernel. */
  get front(): Entry | null {
    const { currentWidget } = this.tracker;
    return (currentWidget && this.byNotebook.get(currentWidget)) ?? null;
  }

  /** The name of the notebook of an entry; empty if no other one has a connection. */
  nameOf(entry: Entry): string {
    const path = (each: Entry): string => each.notebook.context.localPath;
    return notebookName(path(entry), this.entries.map(path));
  }

  entryOf(notebook: NotebookPanel): Entry | null {
    return this.byNotebook.get(notebook) ?? null;
  }

  /** Emitted when a notebook is opened, closed, renamed or made current. */
  get changed(): ISignal<this, void> {
    return this.changedSignal;
  }

  /** Emitted when the state of a connection changes. */
  get linkChanged(): ISignal<this, Entry> {
    return this.linkSignal;
  }

  /** Emitted for every message of any kernel. */
  get received(): ISignal<this, ReceivedBy> {
    return this.receivedSignal;
  }

  private watch(notebook: NotebookPanel): void {
    const { sessionContext } = notebook;
    // Several views of a notebook share its context, which outlives each of them: disconnect what the closed view had.
    const receiver = {};
    sessionContext.kernelChanged.connect(() => void this.attach(notebook), receiver);
    sessionContext.statusChanged.connect((_, status) => this.follow(notebook, status), receiver);
    notebook.context.pathChanged.connect(() => this.changedSignal.emit(), receiver);
    notebook.disposed.connect(() => {
      Signal.disconnectReceiver(receiver);
      this.detach(notebook);
    });
    void this.attach(notebook);
  }

  /** Connect a notebook to its current kernel; repeated calls connect once. */
  private async attach(notebook: NotebookPanel): Promise<void> {
    const kernel = kernelOf(notebook.sessionContext);
    if (this.byNotebook.get(notebook)?.kernel === kernel) {
      return;
    }
    this.detach(notebook);
    const isCurrent = (): boolean => !notebook.isDisposed && kernelOf(notebook.sessionContext) === kernel;
    const isWanted = kernel && (await isOurs(kernel).catch(() => false));
    if (!isWanted || !isCurrent() || this.byNotebook.has(notebook)) {
      return;
    }
    const entry: Entry = { notebook, kernel, connection: new Connection(portOf(kernel), UUID.uuid4) };
    entry.connection.isWatched = !document.hidden;
    entry.connection.received.connect((_, received) => this.receivedSignal.emit({ entry, ...received }));
    entry.connection.linkChanged.connect(() => this.linkSignal.emit(entry));
    this.byNotebook.set(notebook, entry);
    this.changedSignal.emit();
  }

  private detach(notebook: NotebookPanel): void {
    const entry = this.byNotebook.get(notebook);
    if (entry) {
      this.byNotebook.delete(notebook);
      entry.connection.dispose();
      this.changedSignal.emit();
    }
  }

  private follow(notebook: NotebookPanel, status: Kernel.Status): void {
    const connection = this.byNotebook.get(notebook)?.connection;
    if (status === 'restarting' || status === 'autorestarting' || status === 'starting') {
      connection?.reset();
    } else if (status === 'dead') {
      connection?.close();
    }
  }

  private readonly byNotebook = new Map<NotebookPanel, Entry>();
  private readonly changedSignal = new Signal<this, void>(this);
  private readonly linkSignal = new Signal<this, Entry>(this);
  private readonly receivedSignal = new Signal<this, ReceivedBy>(this);
}

/** The session's own connection to its kernel: copies of it can't create comms. */
function kernelOf(sessionContext: ISessionContext): Kernel.IKernelConnection | null {
  return sessionContext.session?.kernel ?? null;
}
