"""The public programs that run on the simulated device: where each lies in a checkout of its project, and within what it is to agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Program:
    """A script or notebook of a project; `skip`: patterns of names that are not compared, `without`: a function that does nothing here."""

    project: str
    path: str
    bound: float = 1e-3
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    without: str = ""
    remark: str = ""

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{self.project}: {PurePosixPath(self.path).stem}"

    @property
    def short(self) -> str:
        """As files have it."""
        return f"{self.project}-{PurePosixPath(self.path).stem}"


CHAINS = (r"samples\[", r"vmap_args", r": means$", r": predictions$", "percentiles", "^printed:", "^points")
CHAINS_REMARK = "its Markov chain parts from the CPU's after a rounding; compared is the mean of the predictions of all samples"
PLATFORM = "numpyro.set_platform"
REASONS = ("`numpyro.set_platform` knows JAX's own platforms by name and no plugin; `JAX_PLATFORMS` says it.",)
"""Why programs are run as they are."""

PROGRAMS: tuple[Program, ...] = (
    Program("equinox", "docs/examples/init_apply.ipynb"),
    Program("equinox", "docs/examples/serialisation.ipynb"),
    Program(
        "equinox", "docs/examples/stateful.ipynb", 2e-2,
        remark="Adam makes full steps of gradients near zero: JAX's CPU backend differs by 1.6e-2 from itself with `JAX_DISABLE_JIT=1`",
    ),
    Program("equinox", "docs/examples/train_rnn.ipynb"),
    Program("equinox", "docs/examples/frozen_layer.ipynb"),
    Program("diffrax", "docs/examples/coupled_odes.ipynb"),
    Program("diffrax", "docs/examples/forcing.ipynb"),
    Program("diffrax", "docs/examples/hessian.ipynb"),
    Program(
        "diffrax", "docs/examples/steady_state.ipynb", 5e-3,
        remark="the solver's own tolerance is 1e-3",
    ),
    Program("diffrax", "docs/examples/kalman_filter.ipynb"),
    Program("diffrax", "docs/examples/stiff_ode.ipynb", skip=("^start$", "^end$"), remark="it asks for f64"),
    Program("optax", "docs/getting_started.ipynb"),
    Program("optax", "examples/perturbations.ipynb"),
    Program("optax", "examples/ogda_example.ipynb"),
    Program("optax", "examples/freezing_parameters.ipynb"),
    Program("optax", "examples/linear_assignment_problem.ipynb"),
    Program("optax", "examples/meta_learning.ipynb"),
    Program(
        "optax", "examples/contrib/sam.ipynb",
        remark="SAM steps along a normalised gradient, which near a minimum is noise: a rounding in step 13 has grown to 1e-3 in step 83; "
        "its plain SGD, momentum and Adam agree within 3e-7 for all 4,000 steps",
    ),
    Program("flax", "docs_nnx/nnx_basics.ipynb"),
    Program("flax", "examples/nnx_toy_examples/01_functional_api.py"),
    Program("flax", "examples/nnx_toy_examples/03_train_state.py"),
    Program(
        "flax", "examples/nnx_toy_examples/04_data_parallel_with_jit.py", environment={"TPUFLOW_DEVICES": "8"},
        remark="on eight devices; that the CPU has as many it says itself",
    ),
    Program(
        "flax", "examples/nnx_toy_examples/06_scan_over_layers.py",
        remark="batch normalisation of equal rows makes numbers of rounding errors: JAX's CPU backend differs by 0.99 from itself with "
        "`JAX_DISABLE_JIT=1`",
    ),
    Program("flax", "examples/nnx_toy_examples/08_save_load_checkpoints.py"),
    Program("flax", "examples/nnx_toy_examples/09_parameter_surgery.py"),
    Program("numpyro", "examples/minipyro.py"),
    Program("numpyro", "examples/gp.py", 5e-2, ("-n", "100", "--num-warmup", "100"), {}, CHAINS, PLATFORM, CHAINS_REMARK),
    Program("numpyro", "examples/bnn.py", 5e-2, ("-n", "100", "--num-warmup", "100"), {}, CHAINS, PLATFORM, CHAINS_REMARK),
    Program("dm-haiku", "docs/notebooks/basics.ipynb"),
    Program("dm-haiku", "docs/notebooks/parameter_sharing.ipynb"),
)  # fmt: skip
