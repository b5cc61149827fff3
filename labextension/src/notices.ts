// Notifications: a rank died, or a command finished.

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { Widget } from '@lumino/widgets';

import { Deaths, Frame, ReplyMessage, formatRanks, meshIn, moment, noticeOf, stillDead } from './model';

/** JupyterLab cuts longer notifications. */
const MAX_NOTICE = 140;

function deathsText({ mesh, ranks, why, at }: Deaths, notebook: string): string {
  const headline = `${meshIn(mesh, notebook)}: ${ranks.length === 1 ? 'rank' : 'ranks'} ${formatRanks(ranks)} died at ${moment(at)}`;
  const text = why ? `${headline}: ${why}` : headline;
  return text.length <= MAX_NOTICE ? text : `${text.slice(0, MAX_NOTICE - 1)}…`;
}

/** The notifications about dead ranks. Each stays until the user dismisses it, or its ranks are replaced or gone. */
export class DeathNotices<Source> {
  /** @param notebook the name of its notebook, if there are several */
  tell(source: Source, deaths: Deaths, notebook: string, open: () => void): void {
    const id = Notification.error(deathsText(deaths, notebook), {
      autoClose: false, // so that a user who was away still sees it
      actions: [{ label: 'Show', callback: open }]
    });
    this.shown.push({ id, source, deaths, notebook });
  }

  /** Withdraws or changes what no longer holds in the last frame of a source; null if the source is gone. */
  follow(source: Source, frame: Frame | null): void {
    this.shown = this.shown.flatMap(notice => {
      if (notice.source !== source) {
        return [notice];
      }
      const deaths = stillDead(notice.deaths, frame);
      if (!deaths) {
        Notification.dismiss(notice.id);
        return [];
      }
      if (deaths.ranks.length !== notice.deaths.ranks.length) {
        Notification.update({ id: notice.id, message: deathsText(deaths, notice.notebook) });
      }
      return [{ ...notice, deaths }];
    });
  }

  /** Follows all sources that are left; the notices of others are withdrawn. */
  keep(frameOf: Map<Source, Frame | null>): void {
    new Set(this.shown.map(({ source }) => source)).forEach(source => this.follow(source, frameOf.get(source) ?? null));
  }

  private shown: { id: string; source: Source; deaths: Deaths; notebook: string }[] = [];
}

/** Show the reply to a command of a mesh: a short one as a notification, a longer one, such as stacks, in a dialog. */
export async function tellReply(title: string, { ok, text }: ReplyMessage, mesh: string, notebook: string): Promise<void> {
  const shown = noticeOf(title, text, mesh, notebook);
  if (shown.length <= MAX_NOTICE && !shown.includes('\n')) {
    Notification.emit(ok ? shown : `${shown} (${moment(Date.now() / 1000)})`, ok ? 'success' : 'error', { autoClose: ok ? 5000 : false });
    return;
  }
  const body = new Widget({ node: document.createElement('pre') });
  body.addClass('monarch-reply');
  body.node.tabIndex = 0; // lets the keyboard scroll it
  body.node.textContent = text;
  await showDialog({ title: `${title}, ${moment(Date.now() / 1000)}`, body, buttons: [Dialog.okButton({ label: 'Close' })] });
}

export function tellError(title: string, error: unknown): void {
  const why = error instanceof Error ? error.message : String(error);
  Notification.error(`${title}: ${why} (${moment(Date.now() / 1000)})`, { autoClose: false });
}
