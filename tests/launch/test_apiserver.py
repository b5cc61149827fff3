"""Connections to pods through an API server."""

from __future__ import annotations

import base64
import hashlib
import socket
import threading

import pytest

from tests.support.waiting import LONG_S

PORT = 9


class ServerThatClosesFirst:
    """Accepts one forwarded port, sends a close frame, and reads until the client closes its socket.

    Attributes:
        may_close: To be set when the client is ready for the close frame.
        is_over: Set when the client has closed its socket.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.may_close = threading.Event()
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as reader:
            headers = {}
            while line := reader.readline().decode().strip():
                name, _, value = line.partition(": ")
                headers[name.lower()] = value
            key = headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
            connection.sendall(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                + f"Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: v4.channel.k8s.io\r\n\r\n".encode()
            )
            for channel in (0, 1):
                connection.sendall(bytes([0x82, 3, channel]) + PORT.to_bytes(2, "little"))
            self.may_close.wait(LONG_S)
            connection.sendall(b"\x88\x00")
            while reader.read(1):
                pass
            self.is_over.set()

    def close(self) -> None:
        self.may_close.set()
        self._listener.close()
        self._thread.join(LONG_S)


def test_the_socket_is_closed_when_the_api_server_ends_the_connection_first() -> None:
    kubernetes = pytest.importorskip("kubernetes")
    from kubernetes.stream import portforward

    from monarch_kernel.launch.kubernetes.apiserver import _close_always

    server = ServerThatClosesFirst()
    try:
        api = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(kubernetes.client.Configuration(host=server.url)))
        forward = portforward(api.connect_get_namespaced_pod_portforward, "pod", "default", ports=str(PORT))
        websocket = forward.websocket  # kept, so that it is not closed because nothing refers to it
        _close_always(websocket)
        server.may_close.set()
        here = forward.socket(PORT)
        assert here.recv(1) == b""
        here.close()
        assert server.is_over.wait(LONG_S)
    finally:
        server.close()
