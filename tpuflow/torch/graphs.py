"""ATen graphs: the decompositions of PyTorch's operations, and rewrites of a joint graph before it is split in forward and backward."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._functorch.partitioners import default_partition
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpuflow.torch.rows.joint import max_pool, max_pool_backward

aten = torch.ops.aten
_MORE = (
    aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update_functional, aten.native_batch_norm, aten.batch_norm_backward,
    aten.native_layer_norm, aten.native_group_norm,
    aten.alpha_dropout, aten.bucketize, aten.dist, aten.grid_sampler_2d, aten.frexp,
    aten.hypot, aten.i0, aten.index_reduce_, aten.ldexp, aten.tril_indices, aten.triu_indices, aten.diagonal_scatter,
    aten.upsample_bicubic2d, aten.upsample_bilinear2d, aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
    aten.upsample_trilinear3d, aten.special_ndtr, aten.special_i0e, aten.special_i1, aten.special_i1e,
)  # fmt: skip
_POOLING = ("max_pool2d_with_indices", "max_pool3d_with_indices")
_POOLING_GRADIENTS = tuple(f"{name}_backward" for name in _POOLING)


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions to core ATen, and of norms and resampling to arithmetic."""
    more = get_decompositions(_MORE)
    return {**core_aten_decompositions(), **more}  # type: ignore[dict-item]


def plain_attention() -> AbstractContextManager[Any]:
    """Within the block, scaled_dot_product_attention is captured as products and a softmax, whose gradients ATen has."""
    return sdpa_kernel(SDPBackend.MATH)


def partition(joint: Any, inputs: Any, **options: Any) -> Any:
    """(forward, backward) of a joint graph; what both need is kept, nothing computed twice."""
    keep_no_indices(joint)
    return default_partition(joint, inputs, **options)


def keep_no_indices(graph_module: torch.fx.GraphModule) -> None:
    """Remove the indices of a max-pooling if only its own gradient reads them; the gradient is then computed from the input.

    With dilated windows JAX has no such gradient, and the indices are kept.

    Before: values, indices = max_pool2d_with_indices(x); gx = max_pool2d_with_indices_backward(g, x, indices)
    After: values = max_pool(x); gx = max_pool_backward(g, x)
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if _name(node) in _POOLING_GRADIENTS and _undilated(node.args[5]):
            _replace(node, max_pool_backward, node.args[:-1], node)
    for node in list(graph.nodes):
        if _name(node) not in _POOLING:
            continue
        values = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        if all(user in values or not user.users for user in node.users):
            for user in values:
                _replace(user, max_pool, node.args, node)
    graph.eliminate_dead_code()
    graph_module.recompile()


def _undilated(dilation: Any) -> bool:
    return set(dilation) <= {1}


def _name(node: torch.fx.Node) -> str:
    return node.target._schema.name.removeprefix("aten::") if isinstance(node.target, torch._ops.OpOverload) else ""


def _replace(node: torch.fx.Node, function: Callable[..., Any], args: tuple[Any, ...], origin: torch.fx.Node) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(function, args)
    new.meta = {**origin.meta, **node.meta}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
