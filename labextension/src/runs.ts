// The section of the panel that lists recorded runs, and compares two.

import type { ComparedMessage, RunFrame, RunsMessage } from '../../monarch_kernel/notebook/view/static/view.js';
import { moment } from './model';
import { aboutRun, boundsOf, choose, figure, knobsOf, pathOf } from './runModel';

const SVG = 'http://www.w3.org/2000/svg';
const WIDTH = 120;
const HEIGHT = 28;
const EMPTY = 'No runs. %mesh record runs/NAME in a cell records one.';

/** The list of runs; `ask` sends a message to the kernel. */
export class RunsSection {
  constructor(private readonly ask: (message: { kind: 'runs' } | { kind: 'compare'; runs: [string, string] }) => void) {
    this.node.className = 'monarch-runs';
    const summary = document.createElement('summary');
    summary.textContent = 'Recorded runs';
    this.note.className = 'monarch-runs-note';
    this.list.className = 'monarch-runs-list';
    this.button.type = 'button';
    this.button.className = 'monarch-runs-compare';
    this.button.textContent = 'Compare';
    this.button.addEventListener('click', () => this.compare());
    this.result.className = 'monarch-runs-result';
    this.result.setAttribute('role', 'status');
    this.node.append(summary, this.note, this.list, this.button, this.result);
    this.node.addEventListener('toggle', () => this.refresh());
    this.draw();
  }

  readonly node = document.createElement('details');

  /** Ask for the list, if it can be seen. */
  refresh(): void {
    if (this.node.open) {
      this.ask({ kind: 'runs' });
    }
  }

  /** Forget the runs of another kernel. */
  clear(): void {
    this.runs = [];
    this.chosen = [];
    this.drawn = '';
    this.result.replaceChildren();
    this.draw();
  }

  receive(message: RunsMessage | ComparedMessage): void {
    if (message.kind === 'compared') {
      this.result.replaceChildren(...this.comparison(message));
      return;
    }
    this.runs = message.runs;
    this.chosen = choose(this.chosen, '', false, this.runs);
    const drawn = JSON.stringify(message.runs);
    if (drawn !== this.drawn) {
      this.drawn = drawn;
      this.draw();
    }
  }

  private compare(): void {
    const [first, second] = this.chosen;
    if (second !== undefined) {
      this.result.textContent = 'Comparing …';
      // The older run comes first, so that a difference reads from the old value to the new one.
      const [old, other] = this.startOf(first) <= this.startOf(second) ? [first, second] : [second, first];
      this.ask({ kind: 'compare', runs: [old, other] });
    }
  }

  private startOf(name: string): number {
    return this.runs.find(run => run.name === name)?.started ?? 0;
  }

  private draw(): void {
    const focused = document.activeElement instanceof HTMLInputElement ? document.activeElement.value : '';
    this.note.textContent = this.runs.length ? '' : EMPTY;
    this.note.hidden = this.runs.length > 0;
    this.button.hidden = this.runs.length < 2;
    this.list.replaceChildren(...this.runs.map(run => this.row(run)));
    this.list.hidden = !this.runs.length;
    this.mark();
    const again = Array.from(this.list.querySelectorAll('input')).find(box => focused && box.value === focused);
    again?.focus();
  }

  /** Show which runs are chosen. */
  private mark(): void {
    for (const box of Array.from(this.list.querySelectorAll('input'))) {
      box.checked = this.chosen.includes(box.value);
    }
    this.button.disabled = this.chosen.length !== 2;
    this.button.title = this.button.disabled ? 'Choose two runs' : '';
  }

  private row(run: RunFrame): HTMLElement {
    const row = document.createElement('li');
    row.className = 'monarch-run';
    row.dataset.outcome = run.outcome;
    const label = document.createElement('label');
    const box = document.createElement('input');
    box.type = 'checkbox';
    box.value = run.name;
    box.addEventListener('change', () => {
      this.chosen = choose(this.chosen, run.name, box.checked, this.runs);
      this.mark();
    });
    const name = document.createElement('span');
    name.className = 'monarch-run-name';
    name.textContent = run.name;
    label.append(box, name);
    row.append(label);
    if (run.curve?.length) {
      row.append(drawing([run.curve], `The curve of ${run.metric} of ${run.name}`));
    }
    row.append(...[aboutRun(run), knobsOf(run), run.started ? moment(run.started) : ''].filter(Boolean).map(text => line(text)));
    return row;
  }

  private comparison(message: ComparedMessage): HTMLElement[] {
    if (message.problem) {
      return [line(message.problem)];
    }
    const [old, other] = message.runs ?? ['', ''];
    const found: HTMLElement[] = [line(`${old} → ${other}`)];
    const curves = [old, other].map(name => this.runs.find(run => run.name === name));
    if (curves[0]?.curve?.length && curves[1]?.curve?.length && curves[0].metric === curves[1].metric) {
      found.push(drawing([curves[0].curve, curves[1].curve], `${curves[0].metric} of ${old} and of ${other}`));
    }
    found.push(line(message.first ? `First difference: ${message.first}` : 'No difference.'));
    const lines = (message.lines ?? []).filter(each => each !== message.first);
    if (lines.length) {
      const list = document.createElement('ul');
      list.append(...lines.map(each => Object.assign(document.createElement('li'), { textContent: each })));
      found.push(list);
    }
    found.push(...(message.more ? [line(`and ${message.more} more`)] : []));
    found.push(...(message.last ?? []).map(([name, first, second]) => line(`${name}: ${figure(first)} → ${figure(second)}`)));
    found.push(line(`Compared: ${message.compared ?? 'nothing'}.`));
    return found;
  }

  private readonly note = document.createElement('p');
  private readonly list = document.createElement('ul');
  private readonly button = document.createElement('button');
  private readonly result = document.createElement('div');
  private runs: RunFrame[] = [];
  private chosen: string[] = [];
  private drawn = '';
}

function line(text: string): HTMLElement {
  return Object.assign(document.createElement('p'), { textContent: text });
}

/** Draw curves in one small picture. */
function drawing(curves: NonNullable<RunFrame['curve']>[], label: string): HTMLElement {
  const picture = document.createElementNS(SVG, 'svg');
  picture.setAttribute('viewBox', `-2 -2 ${WIDTH + 4} ${HEIGHT + 4}`);
  picture.setAttribute('class', 'monarch-run-curve');
  picture.setAttribute('role', 'img');
  picture.setAttribute('aria-label', label);
  const bounds = boundsOf(curves);
  curves.forEach((curve, at) => {
    const path = document.createElementNS(SVG, 'path');
    path.setAttribute('d', pathOf(curve, bounds, WIDTH, HEIGHT));
    path.setAttribute('class', at ? 'monarch-mod-second' : '');
    picture.append(path);
  });
  return picture as unknown as HTMLElement;
}
