"""The environment variables that a Slurm job gets: all of the notebook's, or those of an allow-list."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.launch.registry import ENGINES
from monarch_kernel.launch.slurm import SlurmLauncher
from monarch_kernel.launch.slurm.exported import checked, exported, names_of

HERE = {
    "PATH": "/bin",
    "LC_ALL": "C",
    "HF_HOME": "/data",
    "HF_TOKEN": "secret",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_JOB_ID": "4711",
    "SBATCH_ACCOUNT": "lab",
}


def test_all_but_the_variables_of_another_job_are_sent_by_default() -> None:
    assert exported(HERE, None).keys() == HERE.keys() - {"SLURM_JOB_ID"}


@pytest.mark.parametrize(
    ("names", "more"),
    [((), set()), (("HF_HOME",), {"HF_HOME"}), (("HF_*",), {"HF_HOME", "HF_TOKEN"}), (("SLURM_*",), set())],
)
def test_an_allow_list_leaves_out_the_others(names: tuple[str, ...], more: set[str]) -> None:
    assert exported(HERE, names).keys() == {"PATH", "LC_ALL", "SLURM_CONF", "SBATCH_ACCOUNT"} | more


def test_the_option_takes_names_and_the_words_of_sbatch() -> None:
    (option,) = [each for each in ENGINES["slurm"].options if each.field == "export"]
    assert [option.parse(text) for text in ("ALL", "NONE", "HF_HOME,NCCL_*")] == [("*",), (), ("HF_HOME", "NCCL_*")]
    assert names_of("HF_HOME") == ("HF_HOME",)


@pytest.mark.parametrize("text", ["", "HF_HOME,", "A=1", "two words", "*_TOKEN", "A\nB"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"takes names of variables, such as HF_HOME,NCCL_\*, or ALL, or NONE"):
        names_of(text)


@pytest.mark.parametrize("names", ["HF_HOME", ["A=1"], [""]])
def test_a_launcher_refuses_what_is_no_name(names: Any) -> None:
    with pytest.raises(ValueError, match="HF_HOME"):
        SlurmLauncher(export=names)
    assert checked(["HF_HOME", "NCCL_*", "*"]) == ("HF_HOME", "NCCL_*", "*")
