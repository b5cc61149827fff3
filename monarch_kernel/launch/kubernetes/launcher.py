"""The Kubernetes launcher: each host is a pod.

Theory of operation
===================

A host is a Pod that is never restarted, and a Secret of the same name with the config of its agent, which the container gets as
an environment variable. Both have a label of the launcher, by which it finds them. If the notebook itself runs in a pod of that
namespace, that pod is their owner: when it ends, for whatever reason, the cluster deletes them.

The launcher has three threads, which end with `KubernetesLauncher.close`:

- ``monarch-kubernetes`` runs delayed tasks, one at a time: it connects, creates pods and fetches logs;
- ``monarch-kubernetes-pods`` lists the launcher's pods and watches them, in a loop. The last state that it saw is the state of
  a pod; a pod that was created before a list request, and is not in the list, is gone. So a broken watch loses nothing;
- ``monarch-kubernetes-events`` watches the events of pods, which only improve the texts.

Handles return what these threads have found. A handle reports the end of a pod after its log was fetched. The launcher retries
temporary failures (the API server is unreachable or busy) for a while; any other failure ends the host.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.kubernetes.apiserver import REQUEST_S, ApiServer, RefusedError, is_in_cluster
from monarch_kernel.launch.kubernetes.host import PodHost
from monarch_kernel.launch.kubernetes.pods import TITLE, Json, PodSpec, ended, image_trouble
from monarch_kernel.launch.port_forward import Tunnel
from monarch_kernel.launch.task_thread import DelayedTasks
from monarch_kernel.launch.text import most_common
from monarch_kernel.net.wire.config import LISTENS, AgentConfig

__all__ = ["KubernetesLauncher"]

_CONNECT_PATIENCE_S = 3.0
_PATIENCE_S = 20.0
_GONE_S = 15.0
_REMOVE_S = 30.0
_LOG_TIMES = 9  # after 1, 2, 4 ... seconds: an agent that can't connect reports that early


class KubernetesLauncher:
    """Creates pods as hosts.

    Args:
        image: image of the container, with Python, torch and monarch_kernel in the versions of the notebook.
        namespace: namespace of the pods; by default that of the kubeconfig's context, or of the pod that this runs in.
        gpus: GPUs of each host.
        gpu_resource: the cluster's resource name of a GPU.
        cpus: CPU cores that each host requests.
        mem: memory of each host, as request and limit, such as ``64Gi``.
        service_account: service account of the hosts, with its token; by default they get none.
        node_selector: labels that a node must have.
        context: context of the kubeconfig.
        kubeconfig: the file; by default ``$KUBECONFIG``, ``~/.kube/config``, or the service account of this pod.
        python: interpreter in the image.
        pod: other fields of a pod (tolerations, volumes, imagePullSecrets ...), or a YAML file with them; see `merged`.
        owner: pod that the hosts end with; by default the one that this runs in, if any.
        dial: whether this machine connects to the pods, because they can't connect to it.
        tunnel: whether it does so through the API server, because it can't reach the pods directly either.
        image_patience_s: how long pulling an image may fail before the launcher gives the host up, in seconds.

    Raises:
        LaunchError: the client library is not installed, no cluster is configured, or an argument is not valid.
    """

    name = "kubernetes"

    def __init__(
        self,
        *,
        image: str = "",
        namespace: str = "",
        gpus: int = 0,
        gpu_resource: str = "nvidia.com/gpu",
        cpus: float = 0.0,
        mem: str = "",
        service_account: str = "",
        node_selector: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        context: str = "",
        kubeconfig: str = "",
        python: str = "python3",
        pod: Mapping[str, Any] | str = "",
        owner: str = "",
        dial: bool = False,
        tunnel: bool = False,
        image_patience_s: float = 60.0,
    ) -> None:
        if not image:
            raise LaunchError(f"{TITLE}: no image was given; name one that has monarch_kernel and torch with --image")
        if mem and not re.fullmatch(r"[0-9.]+([KMGTPE]i?|k|m)?", mem):
            raise LaunchError(f"{TITLE}: {mem!r} is not an amount of memory; write it as 64Gi, or 500Mi")
        self._spec = PodSpec(
            image=image,
            session=secrets.token_hex(4),
            gpus=gpus,
            gpu_resource=gpu_resource,
            cpus=cpus,
            mem=mem,
            service_account=service_account,
            node_selector=dict(node_selector),
            python=python or "python3",
            more=_read_more(pod) if isinstance(pod, str) else pod,
        )
        self._kubeconfig = kubeconfig
        self._context = context
        self._in_cluster = is_in_cluster(kubeconfig, context)
        self._owner_name = owner
        self._owner: Json | None = None
        self._dials = dial or tunnel
        self._tunnels = tunnel
        self._patience_s = image_patience_s
        self.namespace = namespace
        self._api: ApiServer | None = None
        self._hosts: dict[str, PodHost] = {}
        self._lock = threading.RLock()  # protects the attributes below, and hosts
        self._changed = threading.Condition(self._lock)
        self._tasks = DelayedTasks("monarch-kubernetes")
        self._threads: list[threading.Thread] = []
        self._trouble = ""
        self._is_closed = False

    def launch(self, configs: Sequence[AgentConfig]) -> list[PodHost]:
        """Request a pod for each config; threads create and watch the pods."""
        with self._lock:
            if self._is_closed:
                raise LaunchError(f"{TITLE}: this launcher is closed")
            hosts = [PodHost(self._spec.name(config.host), config, self._close_host) for config in configs]
            self._hosts.update((host.name, host) for host in hosts)
        for host in hosts:
            self._tasks.at(0.0, partial(self._make, host))
        return hosts

    def progress(self) -> str:
        """Return what the cluster says about pods that are not up yet."""
        with self._lock:
            texts = [host.waits_for() for host in self._hosts.values() if not host.is_settled]
            if texts and self._trouble:
                return f"{TITLE}: {self._trouble}"
        words = most_common(texts)
        return f"{TITLE}: {words}" if words else ""

    def plan(self, hosts: int) -> str:
        """Return the objects that would be created for one of the hosts, as YAML."""
        import yaml

        config = b"<configuration of the agent of this host, with the keys of the session>"
        objects = (self._spec.secret(1, config, None), self._spec.pod(1, None))
        head = f"# {hosts} × this, in namespace {self.namespace or '(of the context)'}\n"
        return head + "---\n".join(yaml.safe_dump(thing, sort_keys=False) for thing in objects)

    def close(self, timeout_s: float) -> None:
        """Delete all pods and secrets, and wait until they are gone."""
        with self._lock:
            hosts = list(self._hosts.values())
        self.close_hosts(hosts, timeout_s)
        left = self._wait(lambda: [host for host in hosts if host.is_in_cluster], _GONE_S)
        for host in left:  # its node is lost, and can't confirm that the pod ended
            self._remove(host, by_force=True)
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        self._tasks.close()
        for host in hosts:
            if host.tunnel is not None:  # created since by the last task
                host.tunnel.close()
        if self._api is not None:
            self._api.hang_up()
        for thread in self._threads:
            thread.join()
        if self._api is not None:
            self._api.close()

    def _close_host(self, host: PodHost, timeout_s: float) -> None:
        self.close_hosts([host], timeout_s)

    def close_hosts(self, hosts: Sequence[PodHost], timeout_s: float) -> None:
        """Delete pods with their secrets; agents that are shutting down have ``timeout_s`` seconds to end."""
        with self._lock:
            for host in hosts:
                host.is_closing = True
            self._changed.notify_all()
        self._wait(lambda: [host for host in hosts if host.runs], timeout_s)
        self._wait(lambda: [host for host in hosts if host.is_being_made], sum(REQUEST_S))
        deadline = time.monotonic() + _REMOVE_S
        for host in hosts:
            if time.monotonic() < deadline:  # an unresponsive API server costs a timeout for each host
                self._remove(host)

    # -- tasks of the thread monarch-kubernetes

    def _connected(self) -> ApiServer:
        if self._api is not None:
            return self._api
        api = ApiServer(self._kubeconfig, self._context, self._in_cluster, self.namespace)
        try:
            self._attempt(api.ping)
            missing = api.missing_rights(dials=self._dials, tunnel=self._tunnels)
            if missing:
                raise RefusedError(
                    f"you may not {', '.join(missing)} in namespace {api.namespace!r}; "
                    "docs/guides/kubernetes.md has the role that you need"
                )
            self._owner = self._find_owner(api)
            since = api.newest_event()
        except RefusedError:
            api.close()
            raise
        self.namespace, self._api = api.namespace, api
        self._start("pods", self._watch_pods, api)
        if since:
            self._start("events", self._watch_events, api, since)
        return api

    def _find_owner(self, api: ApiServer) -> Json | None:
        name = self._owner_name or (socket.gethostname() if self._in_cluster else "")
        if not name:
            return None
        try:
            return api.pod(name)
        except RefusedError as refused:
            if self._owner_name:
                raise RefusedError(f"can't get the pod {name!r}, which must own the hosts: {refused}") from None
            return None  # this pod may not get pods, or has another name than its host name: the hosts have no owner

    def _make(self, host: PodHost) -> None:
        with self._lock:
            if host.is_closing or host.end is not None or self._is_closed:
                return
            host.is_being_made = True
        try:
            self._ask_for(host, self._connected())
        except RefusedError as refused:
            with self._lock:
                # A failure to connect fails all hosts: there is no need to try for each.
                all_of_them = self._hosts.values() if self._api is None else [host]
                for each in all_of_them:
                    each.end = each.end or f"{TITLE}: {refused}"
        finally:
            with self._lock:
                host.is_being_made = False
                self._trouble = ""
                self._changed.notify_all()
        if host.is_closing:  # another thread closed it meanwhile, and may not have waited
            self._remove(host)

    def _ask_for(self, host: PodHost, api: ApiServer) -> None:
        config, number = host.config.encode(), host.config.host
        if self._dials:
            config = json.dumps({**json.loads(config), "addresses": []}).encode()
        secret = self._spec.secret(number, config, self._owner)
        pod = self._spec.pod(number, self._owner)
        self._attempt(lambda: api.create_secret(secret), host)
        host.has_secret = host.is_asked_for = True  # from here on the pod may exist, even if the request fails
        self._attempt(lambda: api.create_pod(pod), host)
        with self._lock:
            host.made_at = time.monotonic()

    def _attempt(self, do: Callable[[], object], host: PodHost | None = None) -> None:
        """Run a request, and retry temporary failures until a deadline, or until the host is closing."""
        deadline, pause_s = time.monotonic() + (_PATIENCE_S if host else _CONNECT_PATIENCE_S), 0.2

        def is_unwanted() -> bool:
            return self._is_closed or (host is not None and host.is_closing)

        while True:
            if is_unwanted():
                raise RefusedError("no longer wanted")
            try:
                do()
                return
            except RefusedError as refused:
                if not refused.is_temporary or time.monotonic() + pause_s > deadline:
                    raise
                with self._lock:
                    self._trouble = str(refused)
                    self._changed.wait_for(is_unwanted, pause_s)
                pause_s *= 2

    def _fetch_log(self, host: PodHost, delay_s: float = 0.0) -> None:
        """Fetch the last lines of a host's log; with a delay, fetch them again after twice that delay."""
        if self._api is None or host.is_closing:
            return
        with contextlib.suppress(RefusedError):  # no log yet, or the node is lost: keep the last one
            host.log = self._api.log(host.name)
        if delay_s and host.runs and delay_s < 2**_LOG_TIMES:
            self._tasks.at(delay_s, partial(self._fetch_log, host, 2 * delay_s))

    def _find_address(self, host: PodHost, delay_s: float = 0.2) -> None:
        """Find the address of an agent that the controller dials; retry until its log has the port."""
        if self._api is None or host.pod is None or host.is_closing or not host.runs:
            return
        self._fetch_log(host)
        said = next((line for line in host.log if line.startswith(f"{LISTENS} ")), "")
        at = host.pod["status"].get("podIP", "")
        if not said or not at:
            self._tasks.at(delay_s, partial(self._find_address, host, min(2 * delay_s, 2.0)))
            return
        port = int(said.split()[1])
        if self._tunnels:
            connect = partial(self._api.connect_to, host.name, port)
            host.tunnel = Tunnel(connect, f"monarch-kubernetes-tunnel-{host.config.host}")
            host.address = host.tunnel.address
        else:
            host.address = f"tcp://[{at}]:{port}" if ":" in at else f"tcp://{at}:{port}"

    def _has_ended(self, host: PodHost, how: str) -> None:
        self._fetch_log(host)
        with self._lock:
            host.end = host.end or how
            self._changed.notify_all()

    def _give_up_image(self, host: PodHost) -> None:
        with self._lock:
            since = host.trouble_since
            if since is not None and time.monotonic() >= since + self._patience_s:
                host.end = host.end or f"the pod {host.name} did not come up: {host.trouble}"

    # -- threads that watch

    def _watch_pods(self, api: ApiServer) -> None:
        pause_s = 0.2
        while not self._is_closed:
            began = time.monotonic()
            try:
                listing = api.list_pods(self._spec.selector)
                self._see_all(listing.get("items") or [], began)
                pause_s = 0.2
                for event in api.watch_pods(self._spec.selector, listing["metadata"]["resourceVersion"]):
                    if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):
                        self._see(event["object"], event["type"] == "DELETED")
                    elif event.get("type") == "ERROR":  # the resource version is too old to continue from: list again
                        break
            except RefusedError:
                pause_s = min(2 * pause_s, 10.0)
            if time.monotonic() - began < pause_s:
                self._wait(lambda: True, pause_s)

    def _see_all(self, pods: Sequence[Json], asked_at: float) -> None:
        for pod in pods:
            self._see(pod)
        names = {pod["metadata"]["name"] for pod in pods}
        with self._lock:
            missing = [
                h for h in self._hosts.values() if h.name not in names and h.made_before(asked_at) and not h.is_gone
            ]
        for host in missing:
            self._see(host.pod or {"metadata": {"name": host.name}}, is_gone=True)

    def _see(self, pod: Json, is_gone: bool = False) -> None:
        with self._lock:
            host = self._hosts.get(pod["metadata"]["name"])
            if host is None or host.is_gone:
                return
            was_up = host.is_up
            host.pod, host.is_gone = pod, is_gone
            how = ended(pod, self._spec.mem) or ("it was deleted" if is_gone else None)
            trouble = image_trouble(pod)
            if trouble and host.trouble_since is None:
                host.trouble_since = time.monotonic()
                self._tasks.at(self._patience_s, partial(self._give_up_image, host))
            if not trouble:
                host.trouble_since = None
            elif "ErrImagePull" in trouble or not host.trouble:
                host.trouble = trouble  # has the reason; ImagePullBackOff, which follows, does not
            if how is not None and not host.is_ending:
                host.is_ending = True
                text = (
                    f"the pod {host.name} did not come up: {how}" if not host.is_up else f"the pod {host.name}: {how}"
                )
                if is_gone or not host.is_up:
                    host.end = host.end or text  # there is no log
                else:
                    self._tasks.at(-1.0, partial(self._has_ended, host, text))
            elif host.is_up and not was_up:
                self._tasks.at(1.0, partial(self._fetch_log, host, 1.0))
                if self._dials:
                    self._tasks.at(0.0, partial(self._find_address, host))
            self._changed.notify_all()

    def _watch_events(self, api: ApiServer, since: str) -> None:
        pause_s = 0.2
        while not self._is_closed:
            began = time.monotonic()
            try:
                for event in api.watch_events(since):
                    thing = event.get("object") or {}
                    if event.get("type") == "ERROR":
                        since = api.newest_event()
                        break
                    since = (thing.get("metadata") or {}).get("resourceVersion") or since
                    with self._lock:
                        host = self._hosts.get((thing.get("involvedObject") or {}).get("name", ""))
                        if host is not None and event.get("type") in ("ADDED", "MODIFIED"):
                            host.events.append(thing)
                pause_s = 0.2
            except RefusedError as refused:
                if refused.status == 403:
                    return  # no permission for events; the conditions of pods must suffice
                if refused.status == 410:
                    since = api.newest_event()
                pause_s = min(2 * pause_s, 10.0)
            if time.monotonic() - began < pause_s:
                self._wait(lambda: True, pause_s)

    # -- common

    def _start(self, suffix: str, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, name=f"monarch-kubernetes-{suffix}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait(self, left: Callable[[], Any], timeout_s: float) -> Any:
        """Wait until nothing is left, the launcher is closed, or the timeout is over; return what is left."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_closed or not left(), timeout_s)
            return left()

    def _remove(self, host: PodHost, by_force: bool = False) -> None:
        if host.tunnel is not None:
            host.tunnel.close()
        api = self._api
        if api is None:
            return
        if host.is_asked_for and not host.is_gone:
            try:
                api.delete_pod(host.name, by_force)
            except RefusedError as refused:
                self._after_removal(host, refused)
            else:
                if by_force:
                    host.is_gone = True
        if host.has_secret:
            try:
                api.delete_secret(host.name)
                host.has_secret = False
            except RefusedError as refused:
                host.has_secret = refused.status != 404

    def _after_removal(self, host: PodHost, refused: RefusedError) -> None:
        if refused.status == 404:
            with self._lock:
                host.is_gone = True
                self._changed.notify_all()
        elif not refused.is_temporary:
            host.is_given_up = True  # a retry can't help: do not wait for its end


def _read_more(file: str) -> Json:
    """Read a partial pod from a YAML file."""
    if not file:
        return {}
    import yaml

    try:
        more = yaml.safe_load(Path(file).expanduser().read_text())
    except (OSError, yaml.YAMLError) as error:
        raise LaunchError(f"{TITLE}: {file} can't be read: {error}") from error
    if not isinstance(more, dict):
        raise LaunchError(f"{TITLE}: {file} is not part of a pod: it must start with spec: or metadata:")
    return more
