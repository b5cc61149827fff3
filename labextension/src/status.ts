// The status bar item: summarises the meshes of the current notebook; a click opens the panel.

import { ISignal, Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import { ReceivedBy, Hub } from './hub';
import { hasTrouble, summary, waitsOf } from './model';

export class MeshStatus extends Widget {
  constructor(
    private readonly hub: Hub,
    open: () => void
  ) {
    super({ node: document.createElement('button') });
    this.addClass('monarch-status');
    this.node.addEventListener('click', open);
    hub.changed.connect(this.draw, this);
    hub.linkChanged.connect(this.draw, this);
    hub.received.connect(this.handle, this);
    this.draw();
  }

  /** Whether the item has text to show. */
  get isActive(): boolean {
    return this.text !== '';
  }

  get activeChanged(): ISignal<this, void> {
    return this.activeSignal;
  }

  private handle(_: Hub, { entry, said }: ReceivedBy): void {
    if (said.kind === 'frame' && entry === this.hub.front) {
      this.draw();
    }
  }

  private draw(): void {
    const connection = this.hub.front?.connection;
    const frame = connection?.frame ?? null;
    const meshes = summary(frame);
    const name = this.hub.front && meshes ? this.hub.nameOf(this.hub.front) : '';
    const words = name ? `${name} · ${meshes}` : meshes;
    const isLost = connection?.link !== 'open';
    const text = words && isLost ? `${words}, not connected` : words;
    const path = this.hub.front?.notebook.context.localPath;
    this.node.title = [`Show the meshes of ${path}`, ...waitsOf(frame)].join('\n');
    if (text === this.text) {
      return;
    }
    const wasActive = this.isActive;
    this.text = text;
    const isTrouble = hasTrouble(frame);
    this.node.classList.toggle('monarch-mod-trouble', isTrouble);
    // The sign repeats the colour, for users who don't see it; screen readers read the text.
    this.node.textContent = isTrouble ? `▲ ${text}` : text;
    this.node.setAttribute('aria-label', text);
    if (wasActive !== this.isActive) {
      this.activeSignal.emit();
    }
  }

  private readonly activeSignal = new Signal<this, void>(this);
  private text = '';
}
