"""Requests to the API server of a Kubernetes cluster, with the official client."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.kubernetes.pods import Json, refusal
from monarch_kernel.launch.port_forward import Connection

__all__ = ["REQUEST_S", "ApiServer", "RefusedError", "is_in_cluster"]

REQUEST_S = (5.0, 10.0)
"""Timeouts of a request for connecting, and for each read, in seconds."""

_LOG_S = (2.0, 3.0)
_WATCH_S = 60
_GRACE_S = 5  # of pods that the launcher deletes: their agents have had time to end
_NEEDED = (
    ("create", "pods", ""),
    ("delete", "pods", ""),
    ("list", "pods", ""),
    ("watch", "pods", ""),
    ("create", "secrets", ""),
    ("delete", "secrets", ""),
)
_NEEDED_TO_DIAL = (("get", "pods", "log"),)
_NEEDED_FOR_TUNNEL = (("create", "pods", "portforward"), ("get", "pods", "portforward"))
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class RefusedError(Exception):
    """The API server refused a request, or did not answer; the text is readable for users.

    Attributes:
        status: HTTP status; 0 if there was no response.
        is_temporary: whether a retry may succeed.
    """

    def __init__(self, text: str, status: int = 0, is_temporary: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.is_temporary = is_temporary


class ApiServer:
    """A client for the API server; objects are plain JSON, and errors are `RefusedError`.

    Args:
        kubeconfig: path of the kubeconfig; empty for the default paths.
        context: context of the kubeconfig; empty for the current one.
        in_cluster: whether to use the service account of this pod instead.
        namespace: the namespace; empty for that of the context, or of the pod.
    """

    def __init__(self, kubeconfig: str, context: str, in_cluster: bool, namespace: str) -> None:
        from kubernetes import client, config

        configuration = client.Configuration()
        try:
            if in_cluster:
                config.load_incluster_config(client_configuration=configuration)
                found = (_SERVICE_ACCOUNT / "namespace").read_text().strip()
            else:
                file = kubeconfig or None
                config.load_kube_config(file, context or None, client_configuration=configuration)
                contexts, active = config.list_kube_config_contexts(file)
                chosen = next((c for c in contexts if c["name"] == context), active)
                found = chosen["context"].get("namespace", "")
        except Exception as error:  # of the client, of YAML, or of a credential plugin; the user must see any of them
            raise RefusedError(f"can't load the configuration of the cluster: {error}") from error
        configuration.retries = 0  # the launcher retries, and reports that in progress()
        configuration.connection_pool_maxsize = 16
        self.namespace = namespace or found or "default"
        self._where = configuration.host
        self._client = client.ApiClient(configuration)
        self._core = client.CoreV1Api(self._client)
        self._forwarded = client.CoreV1Api(client.ApiClient(configuration))
        self._forwarding = threading.Lock()
        self._rights = client.AuthorizationV1Api(self._client)
        self._streams: set[Any] = set()
        self._is_hung_up = False

    def ping(self) -> None:
        """Check that the API server accepts the credentials."""
        self._json("list pods", self._core.list_namespaced_pod, limit=1)

    def missing_rights(self, *, dials: bool, tunnel: bool) -> list[str]:
        """Return the required permissions that are missing, such as ``create pods``; empty if the cluster does not say."""
        missing = []
        for verb, resource, sub in _NEEDED + (
            _NEEDED_TO_DIAL + (_NEEDED_FOR_TUNNEL if tunnel else ()) if dials else ()
        ):
            asked = {"verb": verb, "resource": resource, "subresource": sub, "namespace": self.namespace}
            try:
                answer = self._json(
                    "review access rights",
                    self._rights.create_self_subject_access_review,
                    {
                        "apiVersion": "authorization.k8s.io/v1",
                        "kind": "SelfSubjectAccessReview",
                        "spec": {"resourceAttributes": asked},
                    },
                    namespaced=False,
                )
            except RefusedError:
                return []
            if not (answer.get("status") or {}).get("allowed", True):
                missing.append(f"{verb} {resource}{sub and f'/{sub}'}")
        return missing

    def create_secret(self, secret: Json) -> None:
        """Create a secret, unless it exists."""
        self._create("create secrets", self._core.create_namespaced_secret, secret)

    def create_pod(self, pod: Json) -> None:
        """Create a pod, unless it exists."""
        self._create("create pods", self._core.create_namespaced_pod, pod)

    def delete_secret(self, name: str) -> None:
        """Delete a secret."""
        self._json("delete secrets", self._core.delete_namespaced_secret, name)

    def delete_pod(self, name: str, by_force: bool) -> None:
        """Delete a pod gracefully, or by force, without waiting for its node to confirm that it ended."""
        grace_s = 0 if by_force else _GRACE_S
        self._json("delete pods", self._core.delete_namespaced_pod, name, grace_period_seconds=grace_s)

    def pod(self, name: str) -> Json:
        """Return a pod."""
        return self._json("get pods", self._core.read_namespaced_pod, name)

    def log(self, name: str) -> tuple[str, ...]:
        """Return the last lines that a pod's agent wrote."""
        data = self._request(
            "get pods/log",
            self._core.read_namespaced_pod_log,
            name,
            self.namespace,
            container="agent",
            tail_lines=20,
            _request_timeout=_LOG_S,
        )
        return tuple(data.decode(errors="replace").splitlines())

    def connect_to(self, name: str, port: int) -> Connection:
        """Connect to a port of a pod through the API server.

        Raises:
            OSError: the connection failed.
        """
        from kubernetes.client.exceptions import ApiException
        from kubernetes.stream import portforward

        with self._forwarding:  # portforward() patches its client while it connects
            try:
                forward = portforward(
                    self._forwarded.connect_get_namespaced_pod_portforward, name, self.namespace, ports=str(port)
                )
            except ApiException as error:
                raise ConnectionError(f"the API server refused to forward a port of a pod: {error.reason}") from error
        _close_always(forward.websocket)
        connection: Connection = forward.socket(port)
        return connection

    def list_pods(self, selector: str) -> Json:
        """List all pods that match a label selector."""
        return self._json("list pods", self._core.list_namespaced_pod, label_selector=selector)

    def watch_pods(self, selector: str, version: str) -> Iterator[Json]:
        """Yield changes of pods that match a label selector, from a resource version on."""
        return self._watch("watch pods", self._core.list_namespaced_pod, version, label_selector=selector)

    def newest_event(self) -> str:
        """Return the resource version after which events are new; empty if the user may not list events."""
        try:
            listing = self._json("list events", self._core.list_namespaced_event, limit=1)
        except RefusedError:
            return ""
        return str(listing["metadata"]["resourceVersion"])

    def watch_events(self, version: str) -> Iterator[Json]:
        """Yield events about pods, from a resource version on."""
        only = "involvedObject.kind=Pod"
        return self._watch("watch events", self._core.list_namespaced_event, version, field_selector=only)

    def hang_up(self) -> None:
        """End all current and future watches, in any thread."""
        self._is_hung_up = True
        for stream in list(self._streams):
            with contextlib.suppress(ValueError, OSError):  # it has ended already
                stream.shutdown()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _create(self, doing: str, create: Callable[..., Any], thing: Json) -> None:
        try:
            self._json(doing, create, thing)
        except RefusedError as refused:
            if refused.status != 409 or "already exists" not in str(refused):
                raise  # else an earlier request created it without a response: the names are unique to this launcher

    def _json(self, doing: str, do: Callable[..., Any], *args: object, namespaced: bool = True, **more: object) -> Json:
        if namespaced:
            # The namespace is the argument after the name of an existing object, and before a new object.
            at = 1 if args and isinstance(args[0], str) else 0
            args = (*args[:at], self.namespace, *args[at:])
        answer = self._request(doing, do, *args, _request_timeout=REQUEST_S, **more)
        try:
            found: Json = json.loads(answer)
        except ValueError as error:  # not an API server, for example a login page
            raise RefusedError(f"{self._where} does not answer like an API server: {answer[:100]!r}") from error
        return found

    def _request(self, doing: str, do: Callable[..., Any], *args: object, **more: object) -> bytes:
        from urllib3.exceptions import HTTPError

        response = self._open(doing, do, *args, **more)
        try:
            data: bytes = response.data
            return data
        except (HTTPError, OSError) as error:
            raise self._unreachable(error) from error
        finally:
            response.release_conn()

    def _watch(self, doing: str, do: Callable[..., Any], version: str, **more: object) -> Iterator[Json]:
        from urllib3.exceptions import HTTPError

        timeout_s = (REQUEST_S[0], _WATCH_S + 15.0)
        stream = self._open(
            doing,
            do,
            self.namespace,
            watch=True,
            resource_version=version,
            timeout_seconds=_WATCH_S,
            _request_timeout=timeout_s,
            **more,
        )
        self._streams.add(stream)
        try:
            if self._is_hung_up:
                return
            rest = b""
            for piece in stream.stream(65536, decode_content=True):
                *lines, rest = (rest + piece).split(b"\n")
                yield from (json.loads(line) for line in lines if line.strip())
        except (HTTPError, OSError, ValueError) as error:  # ValueError: half a line, cut by a proxy
            raise self._unreachable(error) from error
        finally:
            self._streams.discard(stream)
            stream.close()

    def _open(self, doing: str, do: Callable[..., Any], *args: object, **more: object) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return do(*args, _preload_content=False, **more)
        except ApiException as error:
            status = int(error.status or 0)
            body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
            text = refusal(status, body or str(error.reason), doing, self.namespace)
            # 409 for another reason than an existing name: another client changed a quota at the same time.
            later = status in (408, 429) or status >= 500 or (status == 409 and "already exists" not in text)
            raise RefusedError(text, status, later) from error
        except (HTTPError, OSError) as error:
            raise self._unreachable(error) from error
        except ValueError as error:  # the client validates requests
            raise RefusedError(f"the request is not valid ({doing}): {_invalid(error)}") from error

    def _unreachable(self, error: Exception) -> RefusedError:
        return RefusedError(f"the API server at {self._where} can't be reached: {error}", is_temporary=True)


def _invalid(error: ValueError) -> str:
    """Describe an invalid request by its fields, without their values, which may be secret."""
    errors = getattr(error, "errors", None)  # pydantic's
    if errors is None:
        return type(error).__name__
    # The first part of a location is the number of an argument.
    return "; ".join(f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in errors())


def is_in_cluster(kubeconfig: str, context: str) -> bool:
    """Return whether to use the service account of this pod, because there is no kubeconfig.

    Raises:
        LaunchError: there is neither, or the client library is not installed.
    """
    try:
        from kubernetes.config import kube_config
    except ImportError as error:
        raise LaunchError(
            f"Kubernetes: {error.name} is not installed; install it with: pip install 'monarch_kernel[kubernetes]'"
        ) from error
    usual = str(kube_config.KUBE_CONFIG_DEFAULT_LOCATION)
    files = [kubeconfig] if kubeconfig else usual.split(":")
    if any(Path(file).expanduser().is_file() for file in files):
        return False
    if kubeconfig or context or not (_SERVICE_ACCOUNT / "token").is_file():
        raise LaunchError(
            f"Kubernetes: no cluster is configured: there is no kubeconfig ({', '.join(files)})"
            + ("" if kubeconfig or context else ", and this is not a pod with a service account")
        )
    return True


def _close_always(websocket: Any) -> None:
    """Have the thread that forwards a port close its socket, also when the API server ends the connection first.

    When it has received a close frame, `websocket.WebSocket.close` does nothing (websocket-client 1.9), and the thread of
    kubernetes-client calls nothing else.
    """
    close = websocket.close

    def close_and_shut_down(*args: Any, **kwargs: Any) -> None:
        close(*args, **kwargs)
        websocket.shutdown()

    websocket.close = close_and_shut_down
