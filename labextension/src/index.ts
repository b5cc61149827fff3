// The plugin that JupyterLab loads; it creates and connects all parts.
//
// `hub` follows the notebooks that are open. `connection` keeps a comm to the kernel of each, opens it again after a restart or
// a loss, and never runs code there. `model` is what is known: pure, and tested without a browser. `panel`, `status`, `notices`,
// `commands` and `toolbar` show it. `hatch_build.py` has npm build all of it into wheels and sdists.

import { ILabShell, ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';

import { addCommands } from './commands';
import { Entry, Hub } from './hub';
import { newDeaths, newMeshes } from './model';
import { DeathNotices } from './notices';
import { MeshPanel } from './panel';
import { MeshStatus } from './status';
import { RunOnMesh } from './toolbar';

const ID = 'monarch-kernel-labextension:plugin';

/** As in `schema/plugin.json`. */
interface Settings {
  notifyOnDeath: boolean;
  openPanel: boolean;
  side: 'left' | 'right';
}

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'The meshes of ranks of monarch_kernel: a panel, a status item, a menu, a toolbar.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ICommandPalette, IStatusBar, ISettingRegistry, IToolbarWidgetRegistry, ILayoutRestorer, ILabShell],
  activate: async (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    palette: ICommandPalette | null,
    statusBar: IStatusBar | null,
    registry: ISettingRegistry | null,
    toolbars: IToolbarWidgetRegistry | null,
    restorer: ILayoutRestorer | null,
    labShell: ILabShell | null
  ) => {
    const hub = new Hub(tracker);
    const panel = new MeshPanel(hub);
    const showPanel = (): void => app.shell.activateById(panel.id);
    let settings: Settings = { notifyOnDeath: true, openPanel: false, side: 'right' };
    // Before the first await: JupyterLab creates toolbars and menus while it starts.
    toolbars?.addFactory<NotebookPanel>('Notebook', 'run-on-mesh', notebook => new RunOnMesh(notebook, hub));
    addCommands(app, hub, tracker, palette, showPanel);
    app.shell.add(panel, settings.side, { rank: 1000 });
    restorer?.add(panel, panel.id);

    if (statusBar) {
      const item = new MeshStatus(hub, showPanel);
      const isActive = (): boolean => item.isActive;
      statusBar.registerStatusItem(ID, { item, align: 'left', rank: 3, isActive, activeStateChanged: item.activeChanged });
    }

    const notices = new DeathNotices<Entry>();
    const followAll = (): void => notices.keep(new Map(hub.entries.map(each => [each, each.connection.frame])));
    hub.changed.connect(followAll);
    hub.linkChanged.connect(followAll); // a kernel that has ended or restarted has no frame
    hub.received.connect((_, { entry, said, before }) => {
      if (said.kind !== 'frame') {
        return;
      }
      notices.follow(entry, said);
      if (panel.shows(entry)) {
        return;
      }
      if (settings.notifyOnDeath) {
        newDeaths(before, said).forEach(deaths => notices.tell(entry, deaths, hub.nameOf(entry), showPanel));
      }
      if (settings.openPanel && newMeshes(before, said).length) {
        showPanel();
      }
    });

    const loaded = await registry?.load(ID).catch(error => console.error(`Could not load the settings of ${ID}.`, error));
    if (loaded) {
      const take = (): void => {
        const { side } = settings;
        settings = loaded.composite as unknown as Settings;
        if (settings.side !== side) {
          labShell?.add(panel, settings.side, { rank: 1000 });
        }
      };
      loaded.changed.connect(take);
      take();
    }
  }
};

export default plugin;
