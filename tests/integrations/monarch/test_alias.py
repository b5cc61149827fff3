"""``import monarch`` imports this package where it was asked for, and says what it lacks."""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import socket
import subprocess
import sys
from contextvars import ContextVar
from pathlib import Path

import cloudpickle
import pytest

from monarch_kernel.integrations.monarch import PATH, timer, workers
from monarch_kernel.integrations.monarch import actor as alias
from monarch_kernel.integrations.monarch.config import (
    configure,
    configured,
    get_global_config,
    parametrize_config,
    parametrize_config_pointwise,
)
from monarch_kernel.integrations.monarch.ndslice import NDSlice, Shape
from monarch_kernel.integrations.monarch.network import AddrType, get_ipaddr, get_sockaddr
from monarch_kernel.integrations.monarch.telemetry import TracingForwarder
from tests.support.waiting import LONG_S

ROOT = Path(__file__).parents[3]


def run(code: str, *path: str | Path, cwd: Path | None = None) -> str:
    """Run a program, and return what it prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def torchmonarch(tmp_path: Path) -> Path:
    """A directory with another package of the name."""
    (tmp_path / "monarch").mkdir()
    (tmp_path / "monarch" / "__init__.py").write_text("real = True\n")
    (tmp_path / "monarch" / "actor.py").write_text("real = True\n")
    return tmp_path


def test_modules_are_the_same_however_they_are_imported() -> None:
    said = run(
        "import monarch, monarch.actor, monarch.rdma, monarch.spmd, monarch.job, monarch.config, monarch.tools\n"
        "import monarch_kernel.actor as ours, monarch_kernel.integrations.monarch.actor as alias\n"
        "from monarch.actor import Actor\n"
        "assert monarch.actor is alias and Actor is ours.Actor and monarch.actor.ProcMesh is ours.ProcMesh\n"
        "hook = lambda failure: None\n"
        "monarch.actor.unhandled_fault_hook = hook\n"
        "assert ours.unhandled_fault_hook is hook is monarch.actor.unhandled_fault_hook\n"
        "print(monarch.Extent(['a'], [2]), 'torch' in __import__('sys').modules)\n",
        PATH,
    )
    assert said == "{a: 2} False\n"


def test_the_alias_does_not_shadow_another_package_unless_asked(torchmonarch: Path) -> None:
    said = run(
        "import monarch_kernel.compat as compat\n"
        "try: compat.install()\n"
        "except ImportError as error: print('shadow=True' in str(error))\n"
        "import monarch.actor\n"
        "print(monarch.actor.real)\n"
        "try: compat.install()\n"
        "except ImportError as error: print('shadow=True' in str(error))\n"
        "compat.install(shadow=True)\n"
        "import monarch.actor\n"
        "print(hasattr(monarch.actor, 'real'), monarch.actor.this_host.__module__)\n",
        torchmonarch,
    )
    assert said.split() == ["True", "True", "True", "False", "monarch_kernel.actor.host_mesh"]


def test_install_twice_and_beside_the_directory_on_the_path() -> None:
    said = run(
        "import sys, monarch_kernel.compat as compat\n"
        "compat.install(); finders = len(sys.meta_path); compat.install()\n"
        "import monarch.actor\n"
        "print(len(sys.meta_path) == finders, monarch is compat.sys.modules['monarch'])\n",
        PATH,
    )
    assert said == "True True\n"


def test_nothing_is_installed_by_an_import() -> None:
    assert importlib.util.find_spec("monarch") is None


def test_a_name_that_is_missing_on_purpose_says_why_and_what_to_use() -> None:
    said = run(
        "import monarch, monarch.job, monarch.tools, pickle\n"
        "try: from monarch import grad_generator\n"
        "except ImportError as error: print(error)\n"
        "try: from monarch.actor import RemoteAllocator\n"
        "except NotImplementedError as error: print(error)\n"
        "try: from monarch.job import SkyPilotJob\n"
        "except ImportError as error: print(error)\n"
        "try: monarch.tools.commands\n"
        "except AttributeError as error: print(error)\n"
        "try: monarch.no_such_name\n"
        "except AttributeError as error: print(error)\n"
        "print(hasattr(monarch, 'Pipe'), getattr(monarch, 'random', None))\n",
        PATH,
    )
    lines = said.splitlines()
    for line, word in zip(
        lines, ["%%remote", "allocate() with a launcher", "SshLauncher", "SlurmJob", "no attribute 'no_such_name'"]
    ):
        assert word in line
    assert lines[5:] == ["False None"]


def test_a_module_that_is_missing_on_purpose_says_why_and_what_to_use() -> None:
    said = run(
        "import sys\n"
        "before = set(sys.modules)\n"
        "for name in ('monarch.common.future', 'monarch.tools.commands', 'monarch.remotemount', 'monarch.simulator'):\n"
        "    try: __import__(name)\n"
        "    except NotImplementedError as error: print(error.name, error)\n"
        "from monarch.tools.network import get_ipaddr\n"
        "print([name for name in sys.modules if 'common' in name and name.startswith('monarch.')])\n"
        "try: from monarch import random\n"
        "except ImportError as error: print(error)\n",
        PATH,
    )
    for line, words in zip(
        said.splitlines(),
        [
            "monarch.common the module monarch.common belongs to",
            "use monarch.job",
            "sync_workspace",
            "spawn_procs",
            "[]",
            "random belongs to",
        ],
        strict=True,
    ):
        assert words in line


def test_libraries_import_public_names_from_private_modules() -> None:
    said = run(
        "import monarch\n"
        "from monarch._src.actor.host_mesh import this_host\n"
        "from monarch._src.actor import actor_mesh\n"
        "from monarch._rust_bindings.monarch_hyperactor.supervision import MeshFailure, SupervisionError\n"
        "from monarch._rust_bindings.monarch_hyperactor.shape import Extent, Slice\n"
        "from monarch._src.job.kubernetes import ImageSpec\n"
        "import monarch.actor as public\n"
        "assert this_host is public.this_host and actor_mesh.Channel is public.Channel and Extent is monarch.Extent\n"
        "assert SupervisionError is public.SupervisionError and Slice is monarch.NDSlice\n"
        "assert monarch.configure is monarch.config.configure and monarch.ActorFuture is monarch.Future\n"
        "try: from monarch._src.actor.actor_mesh import _client_context\n"
        "except ImportError as error: print(error)\n"
        "try: from monarch._src.spmd.host_mesh import host_mesh_from_store\n"
        "except ImportError as error: print(error)\n"
        "for name in ('monarch._src.no_such_module', 'monarch.no_such_module'):\n"
        "    try: __import__(name)\n"
        "    except ImportError as error: print(error)\n",
        PATH,
    )
    for line, words in zip(
        said.splitlines(),
        ["_client_context is private in Monarch", "pass the mesh itself", "No module named", "No module named"],
        strict=True,
    ):
        assert words in line


PROGRAM = """
import os, sys
import helper
from monarch.actor import Actor, ActorError, SupervisionError, current_actor_name, endpoint, this_host
import monarch.actor
monarch.actor.unhandled_fault_hook = lambda failure: None

class Local(Actor):
    @endpoint
    def look(self):
        import monarch.actor
        return "torch" in sys.modules, os.environ.get("CUDA_VISIBLE_DEVICES"), current_actor_name()
    @endpoint
    def leave(self):
        raise SystemExit(3)
    @endpoint(explicit_response_port=True)
    def repeat(self, port):
        port.send("first")
        port.send("second")
        port.exception(ValueError("third"))

os.environ["CUDA_VISIBLE_DEVICES"] = "4,5"
procs = this_host().spawn_procs({"gpus": 2}, bootstrap=helper.boot)
print(procs.spawn("h", helper.Helper).text.call_one().get() if len(procs) == 1 else "")
print(procs.spawn("h", helper.Helper).text.call().get().values())
looks = procs.spawn("look", Local)
print(looks.look.call().get().values())
print([looks.slice(gpus=1).repeat.call_one().get() for _ in range(2)])
try: looks.slice(gpus=0).leave.call_one().get()
except Exception as error: print(type(error).__name__, isinstance(error, RuntimeError))
procs.stop().get()
monarch.actor.shutdown_context().get()
"""
HELPER = """
from monarch.actor import Actor, endpoint
from monarch.rdma import RDMABuffer
import logging, os
def boot():
    import monarch.rdma
    os.environ["BOOTED"] = monarch.rdma.get_rdma_backend()
class Helper(Actor):
    @endpoint
    def text(self):
        buffer = RDMABuffer(bytearray(4))
        return os.environ["BOOTED"], buffer.size(), logging.getLogger().level
"""


def test_ranks_import_the_alias_before_the_users_code(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text(HELPER)
    lines = run(PROGRAM, PATH, tmp_path).splitlines()
    assert lines[1] == "(('tcp', 4, 20), ('tcp', 4, 20))"
    assert lines[2] == "((False, '4,5', \"look{'gpus': 0/2}\"), (False, '4,5', \"look{'gpus': 1/2}\"))"
    assert lines[3] == "['first', 'first']"
    assert lines[4] == "SupervisionError True"


def test_options_of_the_runtime_are_checked_and_kept() -> None:
    for options, error in [
        ({"nope": 1}, ValueError),
        ({"message_delivery_timeout": "abc"}, TypeError),
        ({"message_delivery_timeout": "30"}, TypeError),
        ({"message_delivery_timeout": ""}, TypeError),
        ({"message_delivery_timeout": 7}, TypeError),
        ({"tail_log_lines": True}, TypeError),
        ({"tail_log_lines": -1}, ValueError),
        ({"rdma_qps_per_peer": -1}, TypeError),
        ({"enable_otel_metrics": 1}, TypeError),
        ({"tokio_worker_threads": 0}, ValueError),
        ({"stop_grace_period": None}, TypeError),
        ({"enable_log_forwarding": "yes"}, TypeError),
        ({"message_latency_sampling_rate": "0.5"}, TypeError),
        ({"default_transport": 42}, TypeError),
        ({"default_transport": "carrier pigeon"}, ValueError),
        ({"default_encoding": "json"}, TypeError),
        ({"rdma_max_nics_per_buffer": 0}, ValueError),
    ]:
        with pytest.raises(error):
            configure(tail_log_lines=5, **options) if "tail_log_lines" not in options else configure(**options)
    with pytest.raises(ValueError, match=r"unknown option 'tail_log_line'; did you mean tail_log_lines"):
        configure(tail_log_line=5)
    with configured(
        enable_otel_metrics=False, tokio_worker_threads=2, mesh_orphan_timeout=None, message_latency_sampling_rate=1
    ):
        options = get_global_config()
    assert (options["enable_otel_metrics"], options["tokio_worker_threads"], options["mesh_orphan_timeout"]) == (
        False,
        2,
        None,
    )
    assert isinstance(options["message_latency_sampling_rate"], float)
    before = get_global_config()
    with configured(message_delivery_timeout="90s", tail_log_lines=7, default_transport="tcp") as inside:
        assert (inside["message_delivery_timeout"], inside["tail_log_lines"]) == ("1m 30s", 7)
        assert inside["default_transport"] == alias.ChannelTransport.TcpWithHostname
        assert get_global_config() == inside
    assert get_global_config() == before
    for text, kept in [("1h30m", "1h 30m"), ("2 days 3sec", "2days 3s"), ("0s", "0s"), ("1500 ms", "1s 500ms")]:
        with configured(host_spawn_ready_timeout=text) as inside:
            assert inside["host_spawn_ready_timeout"] == kept


@parametrize_config(tail_log_lines=[1, 2], prefix_with_rank=[True, False])
def test_a_test_runs_with_each_combination_of_options(request: pytest.FixtureRequest) -> None:
    options = get_global_config()
    assert (
        f"tail_log_lines={options['tail_log_lines']}-prefix_with_rank={options['prefix_with_rank']}"
        in request.node.name
    )


def test_options_that_vary_together_have_equally_many_values() -> None:
    @parametrize_config_pointwise(tail_log_lines=[1, 2], read_log_buffer=[3, 4])
    async def look() -> None: ...

    (mark,) = look.pytestmark
    assert mark.args[1] == [
        {"tail_log_lines": 1, "read_log_buffer": 3},
        {"tail_log_lines": 2, "read_log_buffer": 4},
    ]
    with pytest.raises(ValueError, match="equally many values"):
        parametrize_config_pointwise(tail_log_lines=[1, 2], read_log_buffer=[3])
    with pytest.raises(ValueError, match="at least one option"):
        parametrize_config()


def test_slices_and_shapes() -> None:
    whole = NDSlice.new_row_major([2, 3])
    assert (list(whole), whole.strides, whole[4], whole[4:], len(whole)) == ([0, 1, 2, 3, 4, 5], [3, 1], 4, (4, 5), 6)
    with pytest.raises(TypeError, match="from 0"):
        whole[-1]
    shape = Shape(["a", "b"], NDSlice(offset=1, sizes=[2, 2], strides=[4, 1]))
    numbers = (1, 2, 2, 2, 2, 4, 1)  # the offset, the sizes and the strides behind their number
    written = b"".join(n.to_bytes(8, "little") for n in (2, 1)) + b"a" + (1).to_bytes(8, "little") + b"b"
    assert Shape.from_bytes(written + b"".join(n.to_bytes(8, "little") for n in numbers)) == shape
    assert (shape.ranks(), str(shape), shape.coordinates(6)) == ([1, 2, 5, 6], "{a=2,b=2}", {"a": 1, "b": 1})
    assert shape.at("a", 1).ranks() == [5, 6]
    assert shape.select("b", slice(1, 2)).ranks() == [2, 6]
    assert pickle.loads(pickle.dumps(shape)) == shape
    assert dict(shape.extent) == {"a": 2, "b": 2}
    with pytest.raises(IndexError):
        whole.nditem([2, 0])
    with pytest.raises(ValueError, match="strides"):
        NDSlice(offset=0, sizes=[2], strides=[])
    for wrong in (lambda: shape.at("c", 0), lambda: shape.at("a", 2), lambda: shape.select("a", slice(1, 1))):
        with pytest.raises(ValueError, match=r"axis '[ac]'"):
            wrong()
    with pytest.raises(OverflowError, match="from 0"):
        shape.at("a", -1)
    assert (whole.get(4), whole.index(4)) == (4, 4)
    with pytest.raises(OverflowError, match="from 0"):
        whole.get(-1)
    with pytest.raises(ValueError, match="position 6"):
        whole.get(6)
    assert (shape.index(a=1, b=0).ranks(), shape.index(b=1), shape.index()) == ([5], shape.at("b", 1), shape)
    with pytest.raises(ValueError, match="'c'"):
        shape.index(a=0, c=1)
    assert alias.ValueMesh(shape, "wxyz").item(a=1, b=0) == "y"
    assert alias.ValueMesh.from_indexed(shape, enumerate("wxyz")).slice(a=0).values() == ("w", "x")


@pytest.mark.parametrize(
    ("ranks", "slices"),
    [
        ([], []),
        ([3, 5, 7], [(3, 3, 2)]),
        ([1, 0], [(0, 2, 1)]),
        ([0, 1, 3], [(0, 2, 1), (3, 1, 1)]),
        ([4, 1, 2, 9, 7, 8], [(1, 2, 1), (4, 2, 3), (8, 2, 1)]),
        ([5, 5], [(5, 1, 1), (5, 1, 1)]),
    ],
)
def test_a_list_of_ranks_is_some_slices(ranks: list[int], slices: list[tuple[int, int, int]]) -> None:
    assert NDSlice.from_list(ranks) == [
        NDSlice(offset=offset, sizes=[size], strides=[stride]) for offset, size, stride in slices
    ]


def test_a_coroutine_runs_in_the_context_of_the_call(session: object) -> None:
    variable: ContextVar[str] = ContextVar("variable", default="none")

    @alias.returns_future
    async def read() -> str:
        return variable.get()

    token = variable.set("the caller's")
    future = read()
    variable.reset(token)
    assert future.get(LONG_S) == "the caller's"


def test_only_a_coroutine_function_returns_a_future() -> None:
    with pytest.raises(TypeError, match="takes an async function, not <built-in function len>"):
        alias.returns_future(len)  # type: ignore[arg-type]


def test_classes_that_use_the_module_can_be_pickled_by_value() -> None:
    assert pickle.loads(pickle.dumps(alias)) is alias
    assert cloudpickle.loads(cloudpickle.dumps(lambda: alias))() is alias


def test_the_timeout_of_a_shutdown_is_checked() -> None:
    for timeout in (-1.0, float("nan"), float("inf"), float(2**64)):
        with pytest.raises(ValueError, match="host_timeout"):
            alias.shutdown_context(host_timeout=timeout)


def test_identifiers_have_names_and_numbers() -> None:
    for text, label, number in [("service", "service", None), ("<2a>", None, 42), ("service<2a>", "service", 42)]:
        uid = alias.Uid.from_string(text)
        assert (str(uid), uid.label, uid.instance_value) == (text, label, number)
        assert uid.is_instance is not uid.is_singleton
        assert str(alias.ProcId.from_string(text)) == text
    assert alias.Uid.instance("x") != alias.Uid.instance("x")
    assert alias.Uid.singleton("x") == alias.Uid.from_string("x")
    assert alias.Uid.instance_from_value(42) == alias.Uid.from_string("<2a>")
    assert alias.Uid.anonymous().label is None
    for text in ("", "a<b", "<xyz>"):
        with pytest.raises(ValueError, match="no identifier"):
            alias.Uid.from_string(text)


def test_spans_and_meters_work_without_a_set_up() -> None:
    @alias.traced
    def plain(x: int) -> int:
        return x

    @alias.traced(name="other")
    async def later(x: int) -> int:
        return x

    with alias.span("block", {"rank": 1}):
        assert plain(3) == 3
    alias.get_meter().create_counter("calls").add(1)
    assert later.__name__ == "later"
    logger = logging.Logger("of the test")
    logger.addHandler(TracingForwarder())
    logger.warning("in no span")


def test_the_timer_is_a_module() -> None:
    said = run(
        "import sys, monarch\n"
        "from monarch.timer import ExecutionTimer\n"
        "from monarch import timer\n"
        "print(timer is monarch.timer and timer.ExecutionTimer is ExecutionTimer, 'torch' in sys.modules)\n",
        PATH,
    )
    assert said == "True False\n"


def test_sections_of_code_are_measured() -> None:
    with timer.ExecutionTimer.time("outer"):
        for _ in range(2):
            timer.execution_timer_start("inner")
            timer.execution_timer_stop("inner")
    found = timer.get_execution_timer_summary()
    inner = found["inner"]
    assert inner["count"] == 2
    assert found["outer"]["total_ms"] >= inner["total_ms"] >= inner["max_ms"] >= inner["min_ms"]
    assert timer.get_latest_timer_measurement("inner").item() == timer.ExecutionTimer.get_latest_measurement("inner")
    assert timer.get_execution_timer_average_ms("inner").item() == inner["mean_ms"]
    assert timer.ExecutionTimer.get_latest_measurement() == 0
    with pytest.raises(RuntimeError, match="'inner' has not started"):
        timer.execution_timer_stop("inner")
    timer.ExecutionTimer.reset()
    assert timer.get_execution_timer_summary() == {}


def test_addresses_of_hosts() -> None:
    assert get_ipaddr("localhost", 80, AddrType.IPv4) == "127.0.0.1"
    assert get_sockaddr("127.0.0.1", 80) == "127.0.0.1:80"
    with pytest.raises(RuntimeError, match="no address of the kind IPv4"):
        get_ipaddr("no.such.host.invalid", 80, AddrType.IPv4)


def test_addresses_of_workers_stay_on_this_machine() -> None:
    place = (socket.AF_INET, ("127.0.0.1", 4444))
    for address in (
        "tcp://127.0.0.1:4444",
        "service<2Mu>@tcp://localhost:4444",
        "tcp://127.0.0.1:4444@tcp://0.0.0.0:4444",
    ):
        assert workers.place_of(address) == place
    assert workers.place_of("id@ipc:///tmp/a@b") == (socket.AF_UNIX, "/tmp/a@b")
    assert workers.place_of("ipc://@name") == (socket.AF_UNIX, "\0name")
    for address in ("tcp://10.0.0.1:26600", "tcp://*:1", "ipc://relative", "metatls://host:1", ""):
        with pytest.raises(ValueError, match="SshLauncher"):
            alias.attach_to_workers(workers=[address])
    with pytest.raises(ValueError, match="trust_all_connections"):
        alias.attach_to_workers(ca="/etc/ca.pem", workers=["ipc:///tmp/w"])
    with pytest.raises(ValueError, match="addresses"):
        alias.attach_to_workers(workers=[])
