"""Names of Monarch that are missing on purpose, with the reason and what to use instead."""

from __future__ import annotations

import dis
import sys
from typing import NoReturn

__all__ = ["MISSING_MODULES", "MissingNameError", "refuse"]


class MissingNameError(ImportError, NotImplementedError):
    """A name of Monarch is missing on purpose; the text says why, and what to use instead."""


_TENSORS = (
    "belongs to Monarch's tensor engine: distributed tensors here have other names of it (monarch.fetch_shard, monarch.remote, "
    "mesh.activate()), but not this one; other ways are actors or, in a notebook, %%remote"
)
_RUST = "is a binding of Monarch's Rust library, and this product has none: use the names of monarch.actor"
_SIMULATOR = (
    "simulates processes: call this_host().spawn_procs(), which starts light processes in a fraction of a second"
)

_TORCHX = (
    "starts a job through TorchX: get hosts from SlurmJob, KubernetesJob or ProcessJob, and run the script by an SPMDActor of "
    "monarch.spmd"
)

_REASONS = {
    **dict.fromkeys(
        (
            "DeviceMesh", "OpaqueObject", "OpaqueRef", "Pipe", "RemoteProcessGroup", "coalescing",
            "create_pipe", "function", "grad_function", "grad_generator", "opaque_method",
            "random", "set_active_stream", "set_meshes", "world_mesh", "builtins", "function_resolvers", "gradient_generator",
            "RemoteException",
        ),
        _TENSORS,
    ),
    **dict.fromkeys(("fake_in_process_host", "sim_proc_mesh", "simulator_mesh", "local_proc_mesh"), _SIMULATOR),
    **dict.fromkeys(("Simulator", "set_meta"), _SIMULATOR),
    **dict.fromkeys(("proc_mesh", "python_local_mesh", "rust_local_mesh", "rust_backend_mesh", "rust_mast_mesh"),
        "is deprecated in Monarch: call this_host().spawn_procs(per_host={'gpus': 8})"),
    "host_mesh_from_store": "reads a store of Monarch: pass the mesh itself, which can be sent",
    "bootstrap_main": _RUST,
    "actor_mesh": _RUST,
    "SimAllocator": _SIMULATOR,
    "ProcessAllocator": "is deprecated in Monarch: call this_host().spawn_procs(), or allocate() with a launcher",
    "LocalAllocator": "is deprecated in Monarch: call this_host().spawn_procs()",
    "RemoteAllocator": "is deprecated in Monarch: call monarch_kernel.actor.allocate() with a launcher",
    "SkyPilotJob": "has no launcher here: use SlurmJob, KubernetesJob, ProcessJob, or allocate() with an SshLauncher",
    "MASTJob": "is for Meta's scheduler: use SlurmJob, KubernetesJob or ProcessJob",
    "LoginJob": "runs a job through a login shell: use allocate() with an SshLauncher",
    **dict.fromkeys(("job_load", "job_loads", "load_current_job", "set_current_job", "DEFAULT_JOB_PATH"),
        "finds a job again that its program has left behind, and here hosts end with the program: call state() of the job in "
        "the program; a mesh of a notebook goes on with %mesh up --detach"),
    "exec_command": "runs a command on a job that goes on by itself: run it in an actor by subprocess, or by shell()",
    **dict.fromkeys(("SERVICE_PROC_IDS_ENV", "SERVICE_PROC_RANK_ENV", "deserialize_service_proc_ids", "new_service_proc_id",
        "ranked_service_proc_id_from_env", "serialize_service_proc_ids", "service_proc_addr", "service_proc_addrs"),
        "names processes of Monarch's workers: allocate() with a launcher starts host agents, whose names are not needed"),
    "attach": "reaches a cluster through one of its hosts: allocate() with an SshLauncher or KubernetesLauncher does so",
    **dict.fromkeys(("SPMDJob", "StoreJob", "serve"), _TORCHX),
    "mast_reserve": "is for Meta's scheduler: use SlurmJob, KubernetesJob or ProcessJob",
    "Selection": "selects ranks in Monarch's messages: use slice() of a mesh",
    "TorchX": "was Monarch's former way to jobs: use SlurmJob or KubernetesJob",
}  # fmt: skip


MISSING_MODULES = {
    **dict.fromkeys(
        (
            "builtins", "cached_remote_function", "common", "controller", "fetch", "gradient", "gradient_generator", "memory",
            "mesh_controller", "opaque_module", "opaque_object", "parallel", "profiler", "random", "remote_class", "safe_torch",
            "tensor_engine", "tensorboard", "worker", "world_mesh",
        ),
        _TENSORS,
    ),
    **dict.fromkeys(("distributed_telemetry", "monarch_dashboard"),
        "belongs to Monarch's dashboard: the panel of JupyterLab and %mesh show meshes"),
    "experimental": "is experimental in Monarch: use the names of monarch.actor",
    "gather_mount": "mounts files of hosts: use a directory that hosts share, or send the content to an actor",
    "notebook": "reserves hosts of Meta's scheduler: use SlurmJob, KubernetesJob or ProcessJob",
    **dict.fromkeys(("proc_mesh", "python_local_mesh", "rust_backend_mesh"),
        "is deprecated in Monarch: call this_host().spawn_procs(per_host={'gpus': 8})"),
    "remotemount": "mounts files on hosts: use a directory that hosts share, or sync_workspace() for code",
    "simulator": _SIMULATOR,
    **dict.fromkeys(("actor_mesh", "bootstrap_main"), _RUST),
    **dict.fromkeys(
        (
            "tools.cli", "tools.colors", "tools.commands", "tools.components", "tools.config", "tools.debug_env",
            "tools.mesh_spec", "tools.utils",
        ),
        "belongs to Monarch's command line: use monarch.job (SlurmJob, KubernetesJob, ProcessJob), or %mesh up --on slurm in a "
        "notebook",
    ),
}  # fmt: skip
"""Modules of Monarch that are missing on purpose -> the reason, and what to use."""


def refuse(module: str, name: str, default: str = "") -> NoReturn:
    """Raise the error for a name that a module does not have. A module's ``__getattr__`` calls this.

    Python replaces an AttributeError of an import statement by an ImportError without its text, and code such as pickle looks
    for names in all modules and expects an AttributeError. So only an import statement gets another error.

    Args:
        module: the module of Monarch.
        name: the name.
        default: the reason for names of the module without a reason.

    Raises:
        AttributeError: it is no import statement, or the name is unknown.
        MissingNameError: an import statement names a name that is missing on purpose.
    """
    why = _why_missing(name) or (f"{module}.{name} {default}" if default and not name.startswith("__") else "")
    if not why:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    caller = sys._getframe(2)
    if caller.f_code.co_code[caller.f_lasti] == dis.opmap["IMPORT_FROM"]:
        raise MissingNameError(why)
    raise AttributeError(why)


def _why_missing(name: str) -> str:
    """Return why Monarch's name is missing, and what to use; empty if the name is unknown."""
    reason = _REASONS.get(name)
    if reason is None and name.startswith("rust_"):
        reason = _RUST
    return "" if reason is None else f"{name} {reason}"
