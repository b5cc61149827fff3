// What the list of recorded runs says of a run. Pure: `runs` draws it.

import type { RunFrame } from './model';

/** Runs that can be compared at once. */
const COMPARED = 2;

/** Steps and values of a curve. */
export type CurvePoints = NonNullable<RunFrame['curve']>;

/** The bounds of some curves: their least and greatest step and value; null if no value is finite. */
export function boundsOf(curves: CurvePoints[]): [[number, number], [number, number]] | null {
  const points = curves.flat().filter((point): point is [number, number] => point[1] !== null && Number.isFinite(point[1]));
  if (!points.length) {
    return null;
  }
  const span = (at: 0 | 1): [number, number] =>
    points.reduce<[number, number]>(
      ([least, most], point) => [Math.min(least, point[at]), Math.max(most, point[at])],
      [Infinity, -Infinity]
    );
  return [span(0), span(1)];
}

/** The path of a curve in a drawing of some size, within bounds; it has a gap where a value is not finite. */
export function pathOf(curve: CurvePoints, bounds: ReturnType<typeof boundsOf>, width: number, height: number): string {
  if (!bounds) {
    return '';
  }
  const place = (value: number, [least, most]: [number, number], room: number): string =>
    (most > least ? ((value - least) / (most - least)) * room : room / 2).toFixed(1);
  let isDown = false;
  return curve
    .map(([step, value]) => {
      if (value === null || !Number.isFinite(value)) {
        isDown = false;
        return '';
      }
      const verb = isDown ? 'L' : 'M';
      isDown = true;
      // A point alone is drawn as a line without length, with round ends.
      const to = `${place(step, bounds[0], width)} ${(height - Number(place(value, bounds[1], height))).toFixed(1)}`;
      return verb === 'M' ? `M${to}L${to}` : `L${to}`;
    })
    .join('');
}

/** Format a value with at most four digits. */
export function figure(value: unknown): string {
  return typeof value === 'number' ? String(Number(value.toPrecision(4))) : value === null ? 'not finite' : String(value);
}

/** Format a size. */
export function size(nbytes: number): string {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let at = 0;
  while (nbytes >= 999.5 && at < units.length - 1) {
    nbytes /= 1000;
    at += 1;
  }
  return `${at ? Number(nbytes.toPrecision(3)) : nbytes} ${units[at]}`;
}

/** Describe a run in one line: outcome, steps, the last value of its metric, deaths, size. */
export function aboutRun(run: RunFrame): string {
  if (run.problem) {
    return run.problem;
  }
  const last = run.last?.find(([name]) => name === run.metric);
  const steps = run.steps ?? 0;
  const deaths = run.deaths ?? 0;
  return [
    run.outcome,
    ...(steps ? [`${steps.toLocaleString('en')} ${steps === 1 ? 'step' : 'steps'}`] : []),
    ...(last ? [`${last[0]} ${figure(last[1])}`] : []),
    ...(deaths ? [`${deaths} ${deaths === 1 ? 'death' : 'deaths'}`] : []),
    ...(run.nbytes !== undefined ? [size(run.nbytes)] : []),
    ...(run.damage ?? [])
  ].join(' · ');
}

/** Describe the knobs of a run: the last value of each, with the step from which it holds. */
export function knobsOf(run: RunFrame): string {
  return (run.knobs ?? [])
    .map(([name, value, step]) => `${name} ${value === null ? 'null' : figure(value)}${step ? ` from step ${step.toLocaleString('en')}` : ''}`)
    .join(', ');
}

/** The chosen runs after a click on one: at most two, without those that are gone. */
export function choose(chosen: string[], name: string, isOn: boolean, runs: RunFrame[]): string[] {
  const kept = chosen.filter(each => each !== name && runs.some(run => run.name === each));
  return isOn ? [...kept, name].slice(-COMPARED) : kept;
}
