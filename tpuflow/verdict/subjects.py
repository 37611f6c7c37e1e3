"""The subjects of `tpuflow.check`: a function with its arguments, or a model with a batch to be trained on, behind one protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax

from tpuflow import amp
from tpuflow.chips import Chip
from tpuflow.estimating.estimating import Calibrated, Estimate, estimate, estimate_training
from tpuflow.numerics.checking import REFERENCE, check_numerics
from tpuflow.numerics.functions import measure_function
from tpuflow.numerics.report import NumericsReport
from tpuflow.stages.nnx_objects import jit_of
from tpuflow.stages.staging import Target, as_array
from tpuflow.verdict.options import Option, donation_option, input_option, loop_option, sink_option

Policy = str | amp.Policy | None
NUMERIC_STEPS = 3
"""Training steps that are measured: more than one, since a dynamic loss scale may skip the first until it has settled."""


class Subject(Protocol):
    """What `tpuflow.check` asks of a step."""

    @property
    def name(self) -> str:
        """What the step is called."""
        ...

    def estimated(self, policy: Policy) -> Estimate:
        """Its modelled time and memory in a precision."""
        ...

    def options(self, found: Estimate | None, policy: Policy) -> Iterator[Option]:
        """What could be done otherwise in the same precision; `found` is the estimate, if the step fits."""
        ...

    def has_data(self) -> bool:
        """Whether arrays were given, and not shapes alone."""
        ...

    def numerics(self, policy: Policy) -> NumericsReport:
        """What happens to the numbers."""
        ...


@dataclass(frozen=True, slots=True)
class Training:
    """A model and one batch of any form; `settings` are further options of `tpuflow.estimate_training`."""

    model: Any
    batch: Any
    chip: Chip
    calibration: Calibrated
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    def estimated(self, policy: Policy) -> Estimate:
        """The sunk training step that `tpuflow.train` would run."""
        shapes = jax.tree.map(_shape, self.batch)
        return estimate_training(self.model, shapes, policy or REFERENCE, chip=self.chip, calibration=self.calibration, **self.settings)

    def options(self, found: Estimate | None, policy: Policy) -> Iterator[Option]:
        """A larger sink, a faster input pipeline; a step's state is given away anyway."""
        if found is not None:
            yield from filter(None, (sink_option(found), input_option(found)))

    def has_data(self) -> bool:
        """Whether the batch is of arrays."""
        return not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(self.batch))

    def numerics(self, policy: Policy) -> NumericsReport:
        """Some steps on the batch, measured."""
        settings = {name: value for name, value in self.settings.items() if name != "sink_size"}
        report = check_numerics(self.model, self.batch, policy or REFERENCE, chip=self.chip, steps=NUMERIC_STEPS, **settings)
        assert isinstance(report, NumericsReport)  # of one policy
        return report


@dataclass(frozen=True, slots=True)
class Function:
    """A function of arrays, and of nnx objects, with its arguments."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    chip: Chip
    donated: tuple[int, ...]
    static: tuple[int, ...]
    calibration: Calibrated

    @property
    def name(self) -> str:
        """What the function is called."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def estimated(self, policy: Policy, donated: tuple[int, ...] | None = None) -> Estimate:
        """One call, with other arguments given away than those that were named, if any are given here."""
        return estimate(
            self.function,
            *self.args,
            chip=self.chip,
            policy=policy,
            donate_argnums=self.donated if donated is None else donated,
            static_argnums=self.static,
            calibration=self.calibration,
            **self.kwargs,
        )

    def options(self, found: Estimate | None, policy: Policy) -> Iterator[Option]:
        """Calls in a loop on the device, and arguments given away."""
        if found is not None and (looped := loop_option(found)):
            yield looped
        arguments = {i: _signatures(arg) for i, arg in enumerate(self.args) if i not in self.static}
        lowered = self._jitted(policy).lower(*self.args, **self.kwargs)
        if option := donation_option(arguments, _signatures(lowered.jaxpr.out_avals), self.donated, partial(self.estimated, policy)):
            yield option

    def has_data(self) -> bool:
        """Whether all arguments are arrays."""
        arrays = self._jitted(None).arrays(*self.args, **self.kwargs)
        return bool(arrays) and not any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays)

    def numerics(self, policy: Policy) -> NumericsReport:
        """One call on the arguments, measured."""
        jitted = self._jitted(policy)
        closed = jitted.lower(*self.args, **self.kwargs).jaxpr
        name = policy.name if isinstance(policy, amp.Policy) else policy or "its own types"
        return measure_function(closed, jitted.arrays(*self.args, **self.kwargs), self.name, name, Target(self.chip))

    def _jitted(self, policy: Policy) -> Any:
        return jit_of((self.args, self.kwargs))(self.function, chip=self.chip, policy=policy, static_argnums=self.static)


def _shape(array: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype) if hasattr(array, "dtype") else _shape(as_array(array))


def _signatures(tree: Any) -> list[tuple[tuple[int, ...], str]]:
    shapes = map(_shape, jax.tree.leaves(tree))
    return [(tuple(s.shape), str(s.dtype)) for s in shapes]
