import { LabIcon } from '@jupyterlab/ui-components';

/** The icon of meshes. */
export const meshIcon = new LabIcon({
  name: 'monarch-kernel:mesh',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 16 16">
  <g class="jp-icon3" fill="#616161">
    <rect x="2" y="2" width="5" height="5" rx="1"/><rect x="9" y="2" width="5" height="5" rx="1"/>
    <rect x="2" y="9" width="5" height="5" rx="1"/><rect x="9" y="9" width="5" height="5" rx="1"/>
  </g>
</svg>`
});
