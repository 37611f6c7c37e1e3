"""The table of operations with regions, of barriers, host transfers and collectives, with the typing rule of each."""

from __future__ import annotations

from tpuflow.dtypes import PRED, S32
from tpuflow.isa.collectives import KINDS, REDUCERS
from tpuflow.isa.elementwise import BINARY
from tpuflow.lower.graph.graph import Graph, TensorType
from tpuflow.lower.graph.op import Call, Op, Types

PUT_SPACES = ("host", "hbm")
"""Memories that a program puts arrays into itself."""


def _barrier(call: Call) -> Types:
    """The operands unchanged, as XLA's OptimizationBarrier: nothing that reads a result runs before all operands are computed."""
    return call.inputs


def _types(values: tuple) -> Types:
    return tuple(v.type for v in values)


def _signature(call: Call, region: Graph, inputs: Types, outputs: Types) -> None:
    if _types(region.inputs) != inputs:
        raise call.error(f"region {region.name!r} must take {', '.join(map(str, inputs))}")
    if _types(region.outputs) != outputs:
        raise call.error(f"region {region.name!r} must return {', '.join(map(str, outputs))}")


def _while(call: Call) -> Types:
    condition, body = call.regions
    _signature(call, condition, call.inputs, (TensorType(PRED),))
    _signature(call, body, call.inputs, call.inputs)
    return call.inputs


def _loop(call: Call) -> Types:
    call.require(call.inputs[:1] == (TensorType(S32),), "the first operand is the trip count, s32[]")
    _signature(call, call.regions[0], call.inputs[1:], call.inputs[1:])
    return call.inputs[1:]


def _switch(call: Call) -> Types:
    call.require(call.inputs[:1] == (TensorType(S32),), "the first operand is the branch number, s32[]")
    call.require(bool(call.regions), "takes at least one branch")
    results = _types(call.regions[0].outputs)
    for branch in call.regions:
        _signature(call, branch, call.inputs[1:], results)
    return results


def _fused(call: Call) -> Types:
    (region,) = call.regions
    _signature(call, region, call.inputs, _types(region.outputs))
    return _types(region.outputs)


def _infeed(call: Call) -> Types:
    call.require(bool(call.asked), "its result types must be given")
    return call.asked


def _outfeed(call: Call) -> Types:
    return ()


def _call_host(call: Call) -> Types:
    """The types with which the host's function is declared."""
    function = call.attrs["function"]
    operands, results = (tuple(TensorType(*t) for t in types) for types in (function.operands, function.results))
    call.require(call.inputs == operands, f"takes ({', '.join(map(str, operands))})")
    return results


def _position(call: Call) -> Types:
    return (TensorType(S32),)


def _collective(call: Call) -> Types:
    """Any dense array with as many elements as `isa.collectives` says that the collective receives."""
    result = call.asked_type()
    (x,) = call.inputs
    kind, chips, reducer = KINDS.get(call.attrs["kind"]), call.attrs["chips"], call.attrs["reducer"]
    call.require(kind is not None and kind.reduces == (reducer != "none") and reducer in REDUCERS, "a kind with or without a reducer")
    assert kind is not None
    if kind.reduces:
        call.require_kind(x.dtype, BINARY[reducer].on)
    if not (x.dtype == result.dtype and result.elems == kind.received_elems(x.elems, chips)):
        raise call.error(f"cannot become {result}")
    return (result,)


def _await(call: Call) -> Types:
    return call.inputs[:1]


def _device_put(call: Call) -> Types:
    """The first operand, in the host's memory or (again) in HBM. With an array that is at the host and an item's number, it is put there
    as that item of the array; with a number alone, the item comes back. What is at the host can only be put elsewhere, be carried by a
    loop, or leave the program."""
    space, count = call.attrs["space"], len(call.inputs)
    call.require(space in PUT_SPACES, f"puts into one of {', '.join(PUT_SPACES)}")
    call.require(count in (1, {"host": 3, "hbm": 2}[space]), "takes an array, and for an item the whole to put it into, and its number")
    if count == 1:
        return _put_whole(call)
    call.require(call.inputs[-1] == TensorType(S32), "the item's number is s32[]")
    whole, item = (call.inputs[1], call.inputs[0]) if space == "host" else (call.inputs[0], call.asked_type())
    good = whole.shape and whole.dtype == item.dtype and whole.elems == whole.shape[0] * item.elems
    call.require(bool(good), f"{item} is no item of {whole} along its first axis")
    return (whole,) if space == "host" else (item,)


def _put_whole(call: Call) -> Types:
    """Under any shape of as many elements, if one is asked for."""
    (x,), asked = call.inputs, call.asked or call.inputs
    call.require(len(asked) == 1 and (asked[0].dtype, asked[0].elems) == (x.dtype, x.elems), "keeps type and number of elements")
    return asked


def _host_array(call: Call) -> Types:
    """Room at the host for an array of which items are to be put there; until then they are zeros."""
    return (call.asked_type(),)


def _host_input(call: Call) -> Types:
    """The operand, an input of the program, which is in the host's memory when that starts."""
    return call.inputs


def _shard(call: Call) -> Types:
    (x,) = call.inputs
    sizes = call.attrs["sizes"]
    good = len(sizes) == len(x.shape) and all(n % size == 0 for n, size in zip(x.shape, sizes, strict=True))
    if not good:
        raise call.error(f"every axis must divide by the chips that it is cut over, {sizes}")
    return (TensorType(x.dtype, tuple(n // size for n, size in zip(x.shape, sizes, strict=True))),)


def _unshard(call: Call) -> Types:
    (x,) = call.inputs
    return (TensorType(x.dtype, tuple(n * size for n, size in zip(x.shape, call.attrs["sizes"], strict=True))),)


CONTROL_OPS = (
    Op("barrier", None, (), _barrier),
    Op("while", None, (), _while, regions=2),
    Op("loop", None, (), _loop, regions=1),
    Op("switch", None, (), _switch, regions=None),
    Op("fused", None, ("kind",), _fused, regions=1),
    Op("infeed", 0, ("port",), _infeed, effect=True),
    Op("outfeed", 1, ("port",), _outfeed, effect=True),
    Op("call_host", None, ("function",), _call_host, effect=True),
    Op("position", 0, ("axis",), _position),
    *(Op(name, 1, ("kind", "reducer", "axes", "chips", "pairs"), _collective) for name in ("collective", "start")),
    *(Op(name, None, ("space",), _device_put) for name in ("device_put", "start_put")),
    Op("host_array", 0, (), _host_array),
    Op("host_input", 1, (), _host_input),
    Op("await", 2, (), _await),
    Op("shard", 1, ("cut", "sizes"), _shard),
    Op("unshard", 1, ("cut", "sizes"), _unshard),
)
