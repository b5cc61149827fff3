// "Run on mesh" in the toolbar of a notebook: writes or removes the `%%remote` line of the active cell.

import { Cell } from '@jupyterlab/cells';
import { NotebookPanel } from '@jupyterlab/notebook';
import { MessageLoop } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import { Entry, ReceivedBy, Hub } from './hub';
import { namedMeshes, selectors } from './model';
import { changeOf, runHere, runOn, selectorOf } from './remote';

/** Whether a cell runs on ranks. */
export function isRemote(cell: Cell | null): boolean {
  return isCode(cell) && selectorOf(cell.model.sharedModel.source) !== null;
}

/** Whether a cell exists and has code; the cell of a closed notebook has no model. */
export function isCode(cell: Cell | null): cell is Cell {
  return cell !== null && !cell.isDisposed && cell.model.type === 'code';
}

/** Make a cell run on ranks, by default those of the mesh last brought up, or in the kernel again. */
export function toggleRemote(cell: Cell | null, entry: Entry | null, selector?: string): void {
  if (isCode(cell)) {
    rewrite(cell, text => (isRemote(cell) ? runHere(text) : runOn(text, selector ?? lastMesh(entry))));
  }
}

/** The name of the mesh last brought up, where cells without a selector run; empty if there is none. */
function lastMesh(entry: Entry | null): string {
  return namedMeshes(entry?.connection.frame ?? null).slice(-1)[0]?.name ?? '';
}

function rewrite(cell: Cell, change: (text: string) => string): void {
  const { sharedModel } = cell.model;
  const { start, end, text } = changeOf(sharedModel.source, change(sharedModel.source));
  sharedModel.updateSource(start, end, text); // to replace the whole text would move the cursor
}

let lists = 0;

export class RunOnMesh extends Widget {
  constructor(
    private readonly notebook: NotebookPanel,
    private readonly hub: Hub
  ) {
    super();
    this.addClass('monarch-run-on');
    this.toggle.type = 'button';
    this.toggle.className = 'monarch-run-on-toggle';
    this.toggle.textContent = 'Run on mesh';
    this.toggle.addEventListener('click', () => {
      toggleRemote(this.cell, hub.entryOf(notebook), this.ranks.value.trim() || undefined);
    });
    lists += 1;
    this.offers.id = `monarch-selectors-${lists}`;
    this.ranks.setAttribute('list', this.offers.id);
    this.ranks.setAttribute('aria-label', 'Ranks that the cell runs on');
    this.ranks.title = 'Which ranks: trainers, trainers[0], trainers[0:4], trainers.slice(dp=0)';
    this.ranks.spellcheck = false;
    this.ranks.addEventListener('change', () => {
      this.typed = this.ranks.value.trim();
      if (this.cell && isRemote(this.cell)) {
        rewrite(this.cell, text => runOn(text, this.ranks.value.trim()));
      }
    });
    this.node.append(this.toggle, this.ranks, this.offers);

    // `Widget.dispose` disconnects slots that have `this`; a closure would stay connected to the hub, which outlives notebooks.
    notebook.content.activeCellChanged.connect(this.follow, this);
    hub.changed.connect(this.draw, this);
    hub.linkChanged.connect(this.draw, this);
    hub.received.connect(this.handle, this);
    this.follow();
  }

  private handle(_: Hub, { entry, said, before }: ReceivedBy): void {
    if (entry.notebook === this.notebook && said.kind === 'frame') {
      before ? this.offer() : this.draw();
    }
  }

  private follow(): void {
    if (this.cell && !this.cell.isDisposed) {
      this.cell.model.contentChanged.disconnect(this.draw, this);
    }
    this.cell = this.notebook.content.activeCell;
    if (this.cell && !this.cell.isDisposed) {
      this.cell.model.contentChanged.connect(this.draw, this);
    }
    this.draw();
  }

  private draw(): void {
    this.setShown(this.hub.entryOf(this.notebook) !== null);
    const selector = isCode(this.cell) ? selectorOf(this.cell.model.sharedModel.source) : null;
    this.toggle.setAttribute('aria-pressed', String(selector !== null));
    this.toggle.disabled = this.ranks.disabled = !isCode(this.cell);
    if (document.activeElement !== this.ranks) {
      this.ranks.value = selector ?? this.wanted;
    }
    const entry = this.hub.entryOf(this.notebook);
    const last = lastMesh(entry);
    const isKnown = entry?.connection.frame || entry?.connection.link === 'closed';
    this.ranks.placeholder = last || (isKnown ? 'no mesh' : 'connecting');
    const on = this.ranks.value || last;
    this.toggle.title = on
      ? `Run the cell on the ranks of ${on} (%%remote), or in the kernel again`
      : 'Run the cell on ranks (%%remote); %mesh up brings up a mesh';
    this.offer();
  }

  /** Show or hide the item; the toolbar then moves items that have no room to its popup, which it does by itself only for a new size. */
  private setShown(isShown: boolean): void {
    if (this.isHidden === !isShown) {
      return;
    }
    this.setHidden(!isShown);
    const { toolbar } = this.notebook;
    const { offsetWidth, offsetHeight } = toolbar.node;
    MessageLoop.postMessage(toolbar, new Widget.ResizeMessage(offsetWidth, offsetHeight));
  }

  /** The last typed selector, as the default for cells without one, if its mesh still exists. */
  private get wanted(): string {
    const meshes = this.hub.entryOf(this.notebook)?.connection.frame?.meshes ?? [];
    const [root] = /^\w*/.exec(this.typed)!;
    return meshes.some(mesh => mesh.name === root) ? this.typed : '';
  }

  private offer(): void {
    const offered = selectors(this.hub.entryOf(this.notebook)?.connection.frame ?? null);
    const key = offered.join('\n');
    if (key !== this.offered) {
      this.offered = key;
      this.draw(); // drops the default if its mesh is gone
      this.offers.replaceChildren(...offered.map(each => new Option(each, each)));
    }
  }

  private readonly toggle = document.createElement('button');
  private readonly ranks = document.createElement('input');
  private readonly offers = document.createElement('datalist');
  private cell: Cell | null = null;
  private offered = '';
  private typed = '';
}
