// The side panel: shows the view of one kernel, by default that of the current notebook.

import { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import { View, mount } from '../../monarch_kernel/notebook/view/static/view.js';
import { Entry, ReceivedBy, Hub } from './hub';
import { meshIcon } from './icons';
import { RunsSection } from './runs';

/** Time between two requests for the list of runs, while it is visible. */
const RUNS_MS = 5000;

const EMPTY = 'No open notebook uses the kernel Python (Monarch). The meshes of such a notebook appear here.';

export class MeshPanel extends Widget {
  constructor(private readonly hub: Hub) {
    super();
    this.id = 'monarch-mesh-panel';
    this.addClass('monarch-panel');
    this.title.icon = meshIcon;
    this.title.caption = 'Meshes of ranks';
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', 'Meshes of ranks');

    this.chooser.className = 'monarch-panel-chooser';
    this.chooser.setAttribute('aria-label', 'Notebook');
    this.chooser.addEventListener('change', () => this.choose(this.offered[this.chooser.selectedIndex] ?? null));
    this.path.className = 'monarch-panel-path';
    this.note.className = 'monarch-panel-note';
    this.host.className = 'monarch-panel-view';
    this.node.append(this.chooser, this.path, this.note, this.host, this.runs.node);
    this.timer = setInterval(() => this.isVisible && !document.hidden && this.runs.refresh(), RUNS_MS);

    hub.changed.connect(this.follow, this);
    hub.linkChanged.connect(this.relink, this);
    hub.received.connect(this.handle, this);
    this.follow();
  }

  /** Whether the meshes of a notebook are visible now. */
  shows(entry: Entry): boolean {
    return this.isVisible && !document.hidden && this.chosen === entry;
  }

  dispose(): void {
    if (!this.isDisposed) {
      clearInterval(this.timer);
      this.choose(null);
      super.dispose();
    }
  }

  protected onAfterShow(message: Message): void {
    super.onAfterShow(message);
    if (this.view && this.chosen?.connection.frame) {
      // The view received no frames while the panel was hidden.
      this.view.receive({ kind: 'frame', ...this.chosen.connection.frame });
      this.chosen.connection.say({ kind: 'hello' }); // for the history
    }
    this.runs.refresh();
    this.draw();
  }

  private relink(_: Hub, entry: Entry): void {
    if (entry === this.chosen) {
      this.view?.receive({ kind: entry.connection.link === 'open' ? 'opened' : 'closed' });
      this.runs.refresh();
    }
  }

  private handle(_: Hub, { entry, said }: ReceivedBy): void {
    // A hidden view need not draw frames, but still waits for replies.
    if (entry === this.chosen && (said.kind === 'runs' || said.kind === 'compared')) {
      this.runs.receive(said);
    } else if (entry === this.chosen && (said.kind !== 'frame' || this.isVisible)) {
      this.view?.receive(said);
    }
  }

  /** Update the list of notebooks from the hub, and choose a notebook that became current. */
  private follow(): void {
    const { entries, front } = this.hub;
    const isNewFront = front !== null && front !== this.front;
    this.front = front ?? this.front;
    this.offered = entries;
    const stays = this.chosen !== null && entries.includes(this.chosen);
    this.choose(isNewFront ? front : stays ? this.chosen : (entries[0] ?? null));
  }

  private choose(entry: Entry | null): void {
    if (entry !== this.chosen) {
      this.view?.dispose();
      this.view = null;
      this.chosen = entry;
      this.runs.clear();
      this.runs.refresh();
    }
    this.draw();
  }

  private draw(): void {
    const { chosen } = this;
    const paths = this.offered.map(each => each.notebook.context.localPath);
    this.chooser.replaceChildren(...paths.map(path => new Option(path)));
    this.chooser.selectedIndex = this.offered.findIndex(each => each === chosen);
    this.chooser.hidden = this.offered.length < 2;
    this.path.textContent = paths.length === 1 ? paths[0] : '';
    this.path.hidden = paths.length !== 1;
    this.note.textContent = chosen ? '' : EMPTY;
    this.note.hidden = chosen !== null;
    this.host.hidden = chosen === null;
    this.runs.node.hidden = chosen === null;
    if (!chosen || !this.isVisible) {
      return;
    }
    const { connection } = chosen;
    if (!this.view) {
      this.view = mount(this.host, { send: message => connection.say(message), frame: connection.frame });
    }
  }

  private readonly chooser = document.createElement('select');
  private readonly path = document.createElement('p');
  private readonly note = document.createElement('p');
  private readonly host = document.createElement('div');
  private readonly runs = new RunsSection(message => this.chosen?.connection.say(message));
  private readonly timer: ReturnType<typeof setInterval>;
  private offered: Entry[] = [];
  private chosen: Entry | null = null;
  private front: Entry | null = null;
  private view: View | null = null;
}
