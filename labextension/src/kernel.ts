// JupyterLab's kernels: which are ours, and how they are reached while a cell runs.

import { Kernel, KernelMessage } from '@jupyterlab/services';

import { Port, TARGET } from './connection';

/** Whether a kernel is monarch_kernel's, by whatever name it was installed. It is asked nothing that an idle one alone answers. */
export async function isOurs(kernel: Kernel.IKernelConnection): Promise<boolean> {
  // Jupyter's server knows this at once. The kernel itself does not answer who it is while a cell runs, such as after a
  // reload of the page.
  const spec = await kernel.spec.catch(() => undefined);
  if (spec?.argv.includes('monarch_kernel')) {
    return true;
  }
  const info = await kernel.info;
  return info.implementation === 'monarch_kernel';
}

/** A kernel, as a connection needs it. */
export function portOf(kernel: Kernel.IKernelConnection): Port {
  return {
    listen(commId, heard, closed) {
      if (kernel.isDisposed || kernel.hasComm(commId)) {
        return;
      }
      const comm = kernel.createComm(TARGET, commId);
      // Nothing is returned: JupyterLab would wait for a promise before it takes the next message.
      comm.onMsg = message => {
        heard(message.content.data);
      };
      comm.onClose = () => {
        closed();
      };
    },
    send(type, content) {
      if (kernel.isDisposed || kernel.status === 'dead') {
        return false;
      }
      // Messages of comms have a type for the shell channel only, where they would wait for the cell that runs.
      const message = KernelMessage.createMessage({
        msgType: type,
        channel: 'control',
        username: kernel.username,
        session: kernel.clientId,
        content
      } as unknown as KernelMessage.IOptions<KernelMessage.IDebugRequestMsg>);
      const future = kernel.sendControlMessage(message, false, true);
      future.done.catch(() => undefined); // a restart cancels it, which is no news here
      return true;
    }
  };
}
