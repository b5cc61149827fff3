// Notifications: a rank died, or a command finished.

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { Widget } from '@lumino/widgets';

import { Deaths, ReplyMessage, formatRanks } from './model';

/** JupyterLab cuts longer notifications. */
const MAX_NOTICE = 140;

export function tellDeaths({ mesh, ranks, why }: Deaths, open: () => void): void {
  const headline = `${mesh}: ${ranks.length === 1 ? 'rank' : 'ranks'} ${formatRanks(ranks)} died`;
  const text = why ? `${headline}: ${why}` : headline;
  const cut = text.length <= MAX_NOTICE ? text : `${text.slice(0, MAX_NOTICE - 1)}…`;
  Notification.error(cut, {
    autoClose: false, // so that a user who was away still sees it
    actions: [{ label: 'Show', callback: open }]
  });
}

/** Show a reply: a short one as a notification, a longer one, such as stacks, in a dialog. */
export async function tellReply(title: string, { ok, text }: ReplyMessage): Promise<void> {
  if (text.length <= MAX_NOTICE && !text.includes('\n')) {
    const shown = text || `${title}: done`;
    Notification.emit(shown, ok ? 'success' : 'error', { autoClose: ok ? 5000 : false });
    return;
  }
  const body = new Widget({ node: document.createElement('pre') });
  body.addClass('monarch-reply');
  body.node.tabIndex = 0; // lets the keyboard scroll it
  body.node.textContent = text;
  await showDialog({ title, body, buttons: [Dialog.okButton({ label: 'Close' })] });
}

export function tellError(title: string, error: unknown): void {
  Notification.error(`${title}: ${error instanceof Error ? error.message : String(error)}`, { autoClose: false });
}
