"""Jobs of Slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from monarch_kernel.integrations.monarch.jobs import DEFAULT_TIMEOUT_S, JobTrait, Request, checked, given
from monarch_kernel.launch.base import Launcher

__all__ = ["SlurmJob"]


class SlurmJob(JobTrait):
    """Nodes of Slurm, through `SlurmLauncher`.

    Args:
        meshes: name -> number of nodes.
        python_exe: the interpreter on the nodes; ``python`` stands for the path of this one.
        slurm_args: further options of ``sbatch``.
        monarch_port: accepted, without an effect.
        job_name: the name of the job in the queue.
        ntasks_per_node: must be 1: each node has one host agent.
        time_limit: such as ``4:00:00``.
        partition: the partition.
        log_dir: the directory for logs, which the nodes share.
        exclusive: whether no other job may run on the nodes.
        gpus_per_node: GPUs of each host.
        cpus_per_task: CPU cores of each host.
        mem: memory of each host.
        job_start_timeout: how long the job may wait in the queue, in seconds.
        account: the account.
        qos: the quality of service.
        out_of_cluster: accepted, without an effect: hosts connect to the program.
        attach_to: accepted, without an effect.
        bind_to: accepted, without an effect.
        unknown: raises an error that says where options of ``sbatch`` go.

    Raises:
        TypeError: another option is given.
        ValueError: a mesh has no nodes, or a node has several tasks.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        python_exe: str = "python",
        slurm_args: Sequence[str] = (),
        monarch_port: int = 22222,
        job_name: str = "monarch_job",
        ntasks_per_node: int = 1,
        time_limit: str | None = None,
        partition: str | None = None,
        log_dir: str | None = None,
        exclusive: bool = True,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
        job_start_timeout: float | None = None,
        account: str | None = None,
        qos: str | None = None,
        out_of_cluster: bool = False,
        attach_to: Any = None,
        bind_to: Any = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(f"SlurmJob() has no argument {next(iter(unknown))!r}; pass options of sbatch as slurm_args")
        if ntasks_per_node != 1:
            raise ValueError(
                f"ntasks_per_node must be 1, not {ntasks_per_node}: each node has one host agent, which starts the processes"
            )
        self._counts = checked(meshes)
        self._timeout_s = job_start_timeout or DEFAULT_TIMEOUT_S
        more = [f"--job-name={job_name}"] if job_name != "monarch_job" else []
        if exclusive and (gpus_per_node or cpus_per_task or mem):
            more.append("--exclusive")
        self._options = given(
            sbatch=(*more, *slurm_args),
            time=time_limit,
            partition=partition,
            gpus=gpus_per_node,
            cpus=cpus_per_task,
            mem=mem,
            account=account,
            qos=qos,
            python="" if python_exe == "python" else python_exe,
            directory=log_dir,
        )

    def add_mesh(self, name: str, num_nodes: int) -> None:
        """Add a mesh, before the hosts are requested.

        Raises:
            ValueError: it has no nodes.
        """
        self._counts |= checked({name: num_nodes})

    def share_node(self, tasks_per_node: int, gpus_per_task: int, partition: str) -> NoReturn:
        """Raise an error: each node has one host agent, which starts all processes there."""
        raise NotImplementedError(
            "a node has one host agent: spawn all processes of the node through it, or give gpus_per_node and exclusive=False"
        )

    def can_run(self, spec: JobTrait) -> bool:
        """Whether the nodes of this job fit another one, which has the same meshes and options."""
        is_same = isinstance(spec, SlurmJob) and (spec._counts, spec._options) == (self._counts, self._options)
        return self.active and is_same

    def _launchers(self) -> Mapping[str, Request]:
        def make() -> Launcher:
            from monarch_kernel.launch.slurm import SlurmLauncher

            return SlurmLauncher(**self._options)

        return {name: (make, count) for name, count in self._counts.items()}
