"""``monarch.job.kubernetes``: jobs of Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_kernel.integrations.monarch.jobs import DEFAULT_TIMEOUT_S, JobTrait, Request, checked, given
from monarch_kernel.launch.base import Launcher

__all__ = ["ImageSpec", "KubeConfig", "KubernetesJob"]

_CPU, _MEMORY = "cpu", "memory"


@dataclass(frozen=True)
class ImageSpec:
    """The image of pods, and their resources.

    Attributes:
        image: the image, which has monarch_kernel and torch.
        resources: such as ``{"nvidia.com/gpu": 4, "cpu": 8, "memory": "64Gi"}``.
        enable_fuse: must be False: files are not mounted on pods.
        shared_memory_size: accepted, without an effect: /dev/shm of a pod can take as much memory as the pod.

    Raises:
        NotImplementedError: ``enable_fuse`` is True.
    """

    image: str
    resources: Mapping[str, str | int] | None = None
    enable_fuse: bool = False
    shared_memory_size: str | None = None

    def __post_init__(self) -> None:
        if self.enable_fuse:
            raise NotImplementedError("files are not mounted on pods: leave enable_fuse out, and add volumes with pod=")


@dataclass(frozen=True)
class KubeConfig:
    """Where the configuration of the cluster is.

    Attributes:
        local: the file; None for that of kubectl or, in a pod, for that of the cluster.
        remote: must be None: `KubernetesLauncher` reads files.

    Raises:
        NotImplementedError: ``remote`` is given.
    """

    local: Path | None = None
    remote: None = None

    def __post_init__(self) -> None:
        if self.remote is not None:
            raise NotImplementedError(
                "a configuration in memory is not taken: write it to a file, and call KubeConfig.from_path(file)"
            )

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> KubeConfig:
        """Return the configuration in a file."""
        return cls(Path(path).expanduser())

    @classmethod
    def from_config(cls, config: Any) -> KubeConfig:
        """Raise the error of ``remote``."""
        return cls(remote=config)

    @property
    def out_of_cluster(self) -> bool:
        """Whether the configuration is in a file, and not that of the cluster or of kubectl."""
        return self.local is not None

    def load(self) -> None:
        """Do nothing: `KubernetesLauncher` reads the file when it needs it."""


class KubernetesJob(JobTrait):
    """Pods of Kubernetes, through `KubernetesLauncher`.

    Args:
        namespace: the namespace of the pods.
        timeout: how long pods may take to come up, in seconds.
        kubeconfig: where the configuration of the cluster is.
        attach_to: must be None: the launcher reaches pods by itself.

    Raises:
        NotImplementedError: ``attach_to`` is given.
    """

    def __init__(
        self,
        namespace: str = "",
        timeout: float | None = None,
        kubeconfig: KubeConfig | None = None,
        attach_to: str | None = None,
    ) -> None:
        if attach_to is not None:
            raise NotImplementedError(
                "attach_to names a port that kubectl forwards: leave it out, and pass tunnel=True to add_mesh() if the pods "
                "can't reach this machine"
            )
        self._namespace = namespace
        self._timeout_s = timeout or DEFAULT_TIMEOUT_S
        self._kubeconfig = kubeconfig or KubeConfig()
        self._pods: dict[str, tuple[int, dict[str, Any]]] = {}

    def add_mesh(
        self,
        name: str,
        num_replicas: int,
        label_selector: str | None = None,
        pod_rank_label: str = "apps.kubernetes.io/pod-index",
        image_spec: ImageSpec | str | None = None,
        port: int = 26600,
        pod_template: Any = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Add a mesh of pods.

        Args:
            name: its name.
            num_replicas: the number of pods.
            label_selector: must be None: the job makes its own pods.
            pod_rank_label: accepted, without an effect.
            image_spec: the image, which is necessary, and the resources.
            port: accepted, without an effect: pods connect to the program.
            pod_template: must be None; ``pod=`` takes further fields of the pod.
            labels: accepted, without an effect.
            annotations: accepted, without an effect.
            options: further arguments of `KubernetesLauncher`, such as ``pod`` and ``tunnel``.

        Raises:
            NotImplementedError: the pods have labels to be found by, or an object of the library `kubernetes` describes them.
            ValueError: there are no pods, or there is no image.
        """
        if label_selector is not None:
            raise NotImplementedError(
                "label_selector finds pods that wait for a program, but KubernetesJob makes its own pods: pass image_spec"
            )
        if pod_template is not None:
            raise NotImplementedError(
                "instead of pod_template pass image_spec, and further fields as pod={'spec': {...}}"
            )
        if image_spec is None:
            raise ValueError(f"mesh {name!r} needs an image: pass image_spec=ImageSpec('registry/image:tag')")
        if isinstance(image_spec, str):
            image_spec = ImageSpec(image_spec)
        options = {"image": image_spec.image, **_resources(image_spec.resources or {}), **options}
        self._pods[name] = checked({name: num_replicas})[name], options

    def _launchers(self) -> Mapping[str, Request]:
        def request(count: int, options: dict[str, Any]) -> Request:
            def make() -> Launcher:
                from monarch_kernel.launch.kubernetes import KubernetesLauncher

                place = given(namespace=self._namespace, kubeconfig=os.fspath(self._kubeconfig.local or ""))
                return KubernetesLauncher(**{**place, **options})

            return make, count

        return {name: request(count, options) for name, (count, options) in self._pods.items()}


def _resources(named: Mapping[str, str | int]) -> dict[str, Any]:
    """Return the arguments of the launcher for resources."""
    found: dict[str, Any] = {}
    for key, value in named.items():
        if key == _CPU:
            text = str(value)
            found["cpus"] = float(text[:-1]) / 1000 if text.endswith("m") else float(text)
        elif key == _MEMORY:
            found["mem"] = str(value)
        else:
            found["gpus"], found["gpu_resource"] = int(value), key
    return found
