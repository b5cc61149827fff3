"""The strategy is registered with Lightning by name, in any order of imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


def run(*lines: str) -> str:
    """Run a program and return its output."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("ours_first", [True, False])
def test_an_import_before_or_after_lightning_registers_the_name(package: str, ours_first: bool) -> None:
    imports = ["import monarch_kernel.integrations.lightning", f"import {package} as L"]
    names = run(
        *(imports if ours_first else reversed(imports)), "print(L.strategies.StrategyRegistry.available_strategies())"
    )
    assert "'monarch', 'monarch_fsdp'" in names


def test_the_extension_registers_the_name_without_importing_lightning() -> None:
    program = [
        "import sys",
        "from IPython.core.interactiveshell import InteractiveShell",
        "shell = InteractiveShell.instance()",
        "shell.run_line_magic('load_ext', 'monarch_kernel')",
        "print('lightning' in sys.modules)",
        "import lightning as L",
        "print('monarch' in L.pytorch.strategies.StrategyRegistry)",
        "try: L.Trainer(strategy='monarch', accelerator='cpu')",
        "except ValueError as error: print(error)",
        "shell.run_line_magic('unload_ext', 'monarch_kernel')",
        "try: L.Trainer(strategy='monarch', accelerator='cpu')",
        "except ValueError as error: print(error)",
    ]
    before, after, without_mesh, without_notebook = run(*program).splitlines()
    assert (before, after) == ("False", "True")
    assert "no mesh is up; bring one up with: %mesh up NAME -n 4" in without_mesh
    assert "write strategy=MonarchStrategy(mesh)" in without_notebook


@pytest.mark.slow
def test_without_lightning_the_error_says_what_to_install() -> None:
    program = [
        "import sys",
        "from monarch_kernel.actor import shutdown_context, this_host",
        "from monarch_kernel.integrations.lightning import MonarchStrategy",
        "sys.modules['lightning'] = None",
        "mesh = this_host().spawn_procs({'gpus': 1}, device='cpu')",
        "try: MonarchStrategy(mesh)",
        "except ImportError as error: print(error)",
        "shutdown_context().get()",
    ]
    assert run(*program) == "lightning is not installed: pip install 'monarch_kernel[lightning]'"


def test_importing_the_package_imports_neither_lightning_nor_torch() -> None:
    assert (
        run("import sys, monarch_kernel.integrations.lightning", "print({'lightning', 'torch'} & {*sys.modules})")
        == "set()"
    )
