"""Trip counts of HLO loops that the compiler has not annotated: of loops that count from a constant to a constant."""

from __future__ import annotations

from dataclasses import replace

from tpuflow.comparing.hlo import Module, Op

PASSED_ON = frozenset(("copy", "bitcast"))
"""What gives its operand's value."""


def with_trips(module: Module) -> Module:
    """The module with the trips of the loops that count."""
    computations = {
        name: tuple(_counted(module, name, op) if op.opcode == "while" and not op.trips else op for op in ops)
        for name, ops in module.computations.items()
    }
    return Module(computations, module.entry, module.devices)


def _counted(module: Module, computation: str, loop: Op) -> Op:
    parts = dict(loop.called)
    condition, body = parts["condition"], parts["body"]
    root = _root(module, condition)
    if root.opcode != "compare" or root.direction != "LT":
        return loop
    counter, limit = (module.op(condition, name) for name in root.operands)
    if counter.opcode != "get-tuple-element" or counter.number is None:
        return loop
    begin, end = _begin(module, computation, loop, counter.number), _constant(module, condition, limit)
    step = _step(module, body, counter.number)
    if begin is None or end is None or not step:
        return loop
    return replace(loop, trips=max(0, -(-(end - begin) // step)))


def _begin(module: Module, computation: str, loop: Op, place: int) -> int | None:
    given = module.op(computation, loop.operands[0])
    return _constant(module, computation, module.op(computation, given.operands[place])) if given.opcode == "tuple" else None


def _step(module: Module, body: str, place: int) -> int | None:
    """What a trip adds to the counter; None if it does something else with it."""
    op, step = module.op(body, _root(module, body).operands[place]), 0
    while op.opcode == "add":
        values = [_constant(module, body, module.op(body, name)) for name in op.operands]
        rest = [name for name, value in zip(op.operands, values, strict=True) if value is None]
        if len(rest) != 1:
            return None
        op, step = module.op(body, rest[0]), step + sum(value for value in values if value is not None)
    return step if op.opcode == "get-tuple-element" and op.number == place else None


def _constant(module: Module, computation: str, op: Op) -> int | None:
    while op.opcode in PASSED_ON:
        op = module.op(computation, op.operands[0])
    return op.number if op.opcode == "constant" else None


def _root(module: Module, computation: str) -> Op:
    return next(op for op in module.computations[computation] if op.root)
