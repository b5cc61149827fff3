// Commands for the palette, the menu and the toolbars. They act on the current notebook through the same connection as the
// view, so no code runs in the kernel.

import { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, ICommandPalette, InputDialog, showDialog } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';

import { Entry, Hub } from './hub';
import { meshIcon } from './icons';
import { Command, meshIn } from './model';
import { tellError, tellReply } from './notices';
import { isCode, isRemote, toggleRemote } from './toolbar';

export const SHOW_PANEL = 'monarch-kernel:show-panel';
const RUN_ON_MESH = 'monarch-kernel:run-on-mesh';
const CATEGORY = 'Mesh';

/** A command of the protocol that needs a mesh and nothing else. */
interface MeshCommand {
  command: Command;
  label: string;
  caption: string;
  /** The question to confirm a command that discards state. */
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
    caption: 'Start new processes for dead ranks; the other ranks keep their state'
  },
  {
    command: 'restart',
    label: 'Restart Ranks…',
    caption: 'End all ranks of a mesh, and start new processes for them',
    confirm: mesh => `This ends all ranks of ${mesh}, discards everything they hold in memory, and starts them again.`
  },
  {
    command: 'down',
    label: 'Bring Mesh Down…',
    caption: 'End a mesh and all of its ranks',
    confirm: mesh => `This ends all ranks of ${mesh} and discards everything they hold in memory.`
  },
  { command: 'stacks', label: 'Show Stacks', caption: 'Show what every rank of a mesh is doing' },
  { command: 'logs', label: 'Show Logs', caption: 'Show the output of the ranks of a mesh' }
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
    caption: 'Show the meshes of the current notebook',
    icon: meshIcon,
    execute: showPanel
  });
  commands.addCommand(RUN_ON_MESH, {
    label: 'Run Cell on Mesh',
    caption: 'Run the cell on the ranks (%%remote), or in the kernel again',
    icon: meshIcon,
    isToggleable: true,
    isToggled: () => isRemote(tracker.activeCell),
    isEnabled: () => hub.front !== null && isCode(tracker.activeCell),
    isVisible: () => hub.front !== null,
    execute: () => toggleRemote(tracker.activeCell, hub.front)
  });
  for (const each of MESH_COMMANDS) {
    commands.addCommand(`monarch-kernel:${each.command}`, {
      label: each.label,
      caption: each.caption,
      isEnabled: () => namesOf(hub.front).length > 0,
      execute: () => run(each, hub)
    });
  }
  for (const id of [SHOW_PANEL, RUN_ON_MESH, ...MESH_COMMANDS.map(each => `monarch-kernel:${each.command}`)]) {
    palette?.addItem({ command: id, category: CATEGORY });
  }
  notifyWhenMeshesChange(app, hub);
}

/** Notifies JupyterLab when commands may have become enabled or disabled, but not with every frame. */
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
  hub.received.connect(check);
}

function namesOf(entry: Entry | null): string[] {
  return (entry?.connection.frame?.meshes ?? []).map(mesh => mesh.name);
}

async function run({ command, label, confirm }: MeshCommand, hub: Hub): Promise<void> {
  const entry = hub.front;
  const verb = label.replace('…', '');
  const mesh = await chooseMesh(verb, namesOf(entry));
  const notebook = entry ? hub.nameOf(entry) : '';
  if (!entry || mesh === null || (confirm && !(await isSure(verb, confirm(meshIn(mesh, notebook)))))) {
    return;
  }
  const title = `${verb} (${meshIn(mesh, notebook)})`;
  try {
    await tellReply(title, await entry.connection.command(command, mesh), mesh, notebook);
  } catch (error) {
    tellError(title, error);
  }
}

async function chooseMesh(title: string, names: string[]): Promise<string | null> {
  if (names.length < 2) {
    return names[0] ?? null;
  }
  const last = names.length - 1; // the default of %%remote, too
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
