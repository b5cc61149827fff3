// Identifies kernels of monarch_kernel, and sends them messages while a cell runs.

import { Kernel, KernelMessage } from '@jupyterlab/services';

import { Port, TARGET } from './connection';

/** Whether a kernel is monarch_kernel, under any installed name. Prefers the kernel spec, since only idle kernels answer. */
export async function isOurs(kernel: Kernel.IKernelConnection): Promise<boolean> {
  // Jupyter's server has the spec. The kernel itself answers no info request while a cell runs, for example after a reload
  // of the page.
  const spec = await kernel.spec.catch(() => undefined);
  if (spec?.argv.some(each => each === 'monarch_kernel' || each.includes('monarch_kernel.__main__'))) {
    return true;
  }
  const info = await kernel.info;
  return info.implementation === 'monarch_kernel';
}

/** Adapts a kernel to the port of a connection. */
export function portOf(kernel: Kernel.IKernelConnection): Port {
  return {
    listen(commId, received, closed) {
      if (kernel.isDisposed || kernel.hasComm(commId)) {
        return;
      }
      const comm = kernel.createComm(TARGET, commId);
      // Return nothing: JupyterLab would await a promise before it handles the next message.
      comm.onMsg = message => {
        received(message.content.data);
      };
      comm.onClose = () => {
        closed();
      };
    },
    send(type, content) {
      if (kernel.isDisposed || kernel.status === 'dead') {
        return false;
      }
      // JupyterLab types comm messages only for the shell channel, where they would wait for the running cell.
      const message = KernelMessage.createMessage({
        msgType: type,
        channel: 'control',
        username: kernel.username,
        session: kernel.clientId,
        content
      } as unknown as KernelMessage.IOptions<KernelMessage.IDebugRequestMsg>);
      const future = kernel.sendControlMessage(message, false, true);
      future.done.catch(() => undefined); // a restart cancels it; statusChanged reports that
      return true;
    }
  };
}
