// Commands for the palette, the menu and the toolbars. They act on the notebook in front, by the same door as the view: no code
// is run in the kernel.

import { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, ICommandPalette, InputDialog, showDialog } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';

import { Entry, Hub } from './hub';
import { meshIcon } from './icons';
import { Command } from './model';
import { tellError, tellReply } from './notices';
import { isRemote, toggleRemote } from './toolbar';

export const SHOW_PANEL = 'monarch-kernel:show-panel';
const RUN_ON_MESH = 'monarch-kernel:run-on-mesh';
const CATEGORY = 'Mesh';

/** A command of the protocol that needs a mesh and nothing else. */
interface MeshCommand {
  command: Command;
  label: string;
  caption: string;
  /** What is asked before something is lost. */
  confirm?: (mesh: string) => string;
}

const MESH_COMMANDS: MeshCommand[] = [
  {
    command: 'interrupt',
    label: 'Interrupt Ranks',
    caption: 'Interrupt what the ranks of a mesh run; they keep their state'
  },
  {
    command: 'heal',
    label: 'Heal: Replace Dead Ranks',
    caption: 'Start new processes in place of dead ranks; the others keep their state'
  },
  {
    command: 'restart',
    label: 'Restart Ranks…',
    caption: 'End all ranks of a mesh, and start new processes in their places',
    confirm: mesh => `All ranks of ${mesh} are ended, with all that they hold in memory, and begin anew.`
  },
  {
    command: 'down',
    label: 'Bring Mesh Down…',
    caption: 'End a mesh and all of its ranks',
    confirm: mesh => `All ranks of ${mesh} are ended, with all that they hold in memory.`
  },
  { command: 'stacks', label: 'Show Stacks', caption: 'Say what every rank of a mesh does now' },
  { command: 'logs', label: 'Show Logs', caption: 'Show what the ranks of a mesh have written' }
];

export function addCommands(
  app: JupyterFrontEnd,
  hub: Hub,
  tracker: INotebookTracker,
  palette: ICommandPalette | null,
  showPanel: () => void
): void {
  const { commands } = app;
  commands.addCommand(SHOW_PANEL, {
    label: 'Show Mesh Panel',
    caption: 'Show the meshes of ranks of the notebook in front',
    icon: meshIcon,
    execute: showPanel
  });
  commands.addCommand(RUN_ON_MESH, {
    label: 'Run Cell on Mesh',
    caption: 'Let the cell run on the ranks (%%remote), or in the kernel again',
    icon: meshIcon,
    isToggleable: true,
    isToggled: () => isRemote(tracker.activeCell),
    isEnabled: () => hub.front !== null && tracker.activeCell?.model.type === 'code',
    isVisible: () => hub.front !== null,
    execute: () => toggleRemote(tracker.activeCell, hub.front)
  });
  for (const each of MESH_COMMANDS) {
    commands.addCommand(`monarch-kernel:${each.command}`, {
      label: each.label,
      caption: each.caption,
      isEnabled: () => namesOf(hub.front).length > 0,
      execute: () => run(each, hub.front)
    });
  }
  for (const id of [SHOW_PANEL, RUN_ON_MESH, ...MESH_COMMANDS.map(each => `monarch-kernel:${each.command}`)]) {
    palette?.addItem({ command: id, category: CATEGORY });
  }
  notifyWhenMeshesChange(app, hub);
}

/** Commands are dimmed where there is no mesh; JupyterLab has to be told when that may have changed, but not with every frame. */
function notifyWhenMeshesChange(app: JupyterFrontEnd, hub: Hub): void {
  let last = '';
  const check = (): void => {
    const now = JSON.stringify([hub.front?.notebook.id, namesOf(hub.front)]);
    if (now !== last) {
      last = now;
      app.commands.notifyCommandChanged();
    }
  };
  hub.changed.connect(check);
  hub.linkChanged.connect(check);
  hub.heard.connect(check);
}

function namesOf(entry: Entry | null): string[] {
  return (entry?.connection.frame?.meshes ?? []).map(mesh => mesh.name);
}

async function run({ command, label, confirm }: MeshCommand, entry: Entry | null): Promise<void> {
  const title = label.replace('…', '');
  const mesh = await chooseMesh(title, namesOf(entry));
  if (!entry || mesh === null || (confirm && !(await isSure(title, confirm(mesh))))) {
    return;
  }
  try {
    await tellReply(`${title} (${mesh})`, await entry.connection.command(command, mesh));
  } catch (error) {
    tellError(title, error);
  }
}

async function chooseMesh(title: string, names: string[]): Promise<string | null> {
  if (names.length < 2) {
    return names[0] ?? null;
  }
  const last = names.length - 1; // the one that %%remote means, too
  return (await InputDialog.getItem({ title, label: 'Mesh', items: names, current: last })).value;
}

async function isSure(title: string, body: string): Promise<boolean> {
  const { button } = await showDialog({
    title,
    body,
    buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: title })]
  });
  return button.accept;
}
