"""Slices at run-time places that are never negative: `jax.lax` would have code in every program that counts negative ones from the end."""

from __future__ import annotations

import functools

from jax import lax

dynamic_slice = functools.partial(lax.dynamic_slice, allow_negative_indices=False)
dynamic_update_slice = functools.partial(lax.dynamic_update_slice, allow_negative_indices=False)
dynamic_slice_in_dim = functools.partial(lax.dynamic_slice_in_dim, allow_negative_indices=False)
dynamic_index_in_dim = functools.partial(lax.dynamic_index_in_dim, allow_negative_indices=False)
dynamic_update_index_in_dim = functools.partial(lax.dynamic_update_index_in_dim, allow_negative_indices=False)
