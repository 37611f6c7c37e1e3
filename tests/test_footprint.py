"""What the verifier claims of a store's footprint, against a walk over the grid."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from tests.places import tile_positions
from tpuflow.device.verify.dims import split_alike
from tpuflow.device.verify.footprint import Box, Trips, cover, disjoint, injective, store_box
from tpuflow.dtypes import F32
from tpuflow.isa.instruction import Tile, TileAxis, Window, WindowAxis


def _random_store(rng: random.Random) -> tuple[Window, Trips]:
    """A random window of rank 1 or 2 over a grid of two axes, most of them plain or nearly so."""
    sizes = {0: rng.randint(1, 3), 1: rng.randint(1, 3)}
    axes, tiles, pitch = [], [], 1
    for n in range(rng.randint(1, 2)):
        extent = rng.randint(1, 8)
        blocked = rng.random() < 0.7
        size = rng.randint(1, 3)
        whole = rng.randint(max(0, size * (sizes[n] - 1)) + 1, size * sizes[n]) if blocked else 0
        tile = TileAxis(size, n, whole) if blocked else TileAxis(size)
        step = rng.choice((1, 1, 1, -1, 2, 0))
        grid = [(n, step * size)] if blocked and rng.random() < 0.8 else []
        if rng.random() < 0.3:
            grid = [*((g, e) for g, e in grid if g != 1 - n), (1 - n, rng.choice((-1, 1, 2, 4, 6)))]
        axes.append(WindowAxis(extent, pitch, rng.randint(-2, 7), tuple(grid), step, rng.choice((1, 1, 1, 2))))
        tiles.append(tile)
        pitch *= extent
    return Window(0, Tile("vmem", 0, F32, tuple(tiles)), tuple(axes)), Trips(sizes, {})


def _hits(window: Window, trips: Trips) -> np.ndarray:
    """How often every element of the buffer is written, by walking the grid."""
    count = np.zeros([a.extent for a in window.axes], np.int64)
    for index in np.ndindex(*trips.free.values()):
        axes = [element[ok] for element, ok in tile_positions(window, index)]
        np.add.at(count, np.ix_(*axes), 1)
    return count


def test_footprints_never_claim_more_than_a_walk_over_the_grid_shows() -> None:
    rng = random.Random(0)
    claims = {"injective": 0, "full": 0, "box": 0}
    for _ in range(4000):
        window, trips = _random_store(rng)
        hits = _hits(window, trips)
        if injective(window, trips, ()):
            claims["injective"] += 1
            assert hits.max(initial=0) <= 1, window
        box = store_box(window, trips)
        if box is None:
            continue
        claims["box"] += 1
        order = sorted(range(len(window.axes)), key=lambda i: -window.axes[i].pitch)
        written = (hits > 0).transpose(order).reshape(-1)
        assert written.sum() == int(np.prod([len(r) for r in box.ranges])), window
        assert box.full == written.all(), window
        claims["full"] += box.full
        mask = np.zeros(box.dims, np.bool_)
        mask[np.ix_(*(np.asarray(r, int) for r in box.ranges))] = True
        assert (mask.reshape(-1) == written).all() if not box.empty else not written.any()
    assert claims["injective"] > 500 and claims["full"] > 100 and claims["box"] > 2000, claims


def test_parts_cover_a_buffer_only_together() -> None:
    left, right = Box((20, 30), (range(20), range(11))), Box((20, 30), (range(20), range(11, 30)))
    assert cover([left, right], 600) and not cover([left], 600) and not cover([left, Box((20, 30), (range(19), range(11, 30)))], 600)
    even, odd = Box((10,), (range(0, 9, 2),)), Box((10,), (range(1, 10, 2),))
    assert cover([even, odd], 10) and disjoint(even, odd) and disjoint(left, right) and not disjoint(left, left)
    assert cover([Box((6,), (range(3),)), Box((3, 2), (range(1, 3), range(2)))], 6)


def test_parts_of_one_buffer_are_apart_whatever_dimensions_they_are_seen_in() -> None:
    thirds = [Box((5, 4), (range(0, 4, 3), range(4))), Box((5, 4), (range(1, 5, 3), range(4))), Box((20,), (range(8, 12),))]
    assert all(disjoint(x, y) == (x is not y) for x in thirds for y in thirds)
    assert not disjoint(thirds[0], Box((20,), (range(12, 16),))) and not disjoint(thirds[0], Box((20,), (range(2, 12),)))


def _random_box(rng: random.Random, elems: int) -> Box:
    dims: list[int] = []
    while elems > 1:
        dims.append(rng.choice([n for n in range(2, elems + 1) if elems % n == 0]))
        elems //= dims[-1]
    ranges = []
    for n in dims:
        low, step = rng.choice((0, 0, rng.randrange(n))), rng.choice((1, 1, 1, 2, 3))
        ranges.append(range(n)[low : rng.choice((n, n, rng.randint(low + 1, n))) : step])
    return Box(tuple(dims), tuple(range(r[0], r[-1] + 1, r.step) for r in ranges))


def _elements(box: Box) -> set[int]:
    places = np.arange(int(np.prod(box.dims))).reshape(box.dims)
    return set(places[np.ix_(*box.ranges)].ravel().tolist())


def test_parts_cover_a_buffer_just_when_their_elements_do() -> None:
    rng = random.Random(1)
    found: dict[object, int] = {True: 0, False: 0}
    for _ in range(3000):
        elems = rng.choice((12, 16, 24, 30))
        boxes = [_random_box(rng, elems) for _ in range(rng.randint(1, 6))]
        covered = len(set().union(*map(_elements, boxes))) == elems
        assert cover(boxes, elems) == covered, boxes
        found[covered] += 1
        split = split_alike([(b.dims, b.ranges) for b in boxes])
        if split is not None:
            assert set().union(*(_elements(Box(*part)) for part in split)) == set().union(*map(_elements, boxes)), boxes
            found["alike"] = found.get("alike", 0) + 1
    assert min(found.values()) > 200, found


def test_whether_long_parts_cover_is_found_without_a_look_at_each_element() -> None:
    n = 10**12
    rows = [Box((n, 6), (range(n), range(k, 6, 3))) for k in range(3)]
    halves = [Box((6 * n,), (range(3 * n),)), Box((n, 2, 3), (range(n // 2, n), range(2), range(3)))]
    assert cover(rows, 6 * n) and not cover(rows[:2], 6 * n)
    assert cover(halves, 6 * n) and cover([rows[0], rows[1], *halves], 6 * n)
    assert not cover([halves[0], replace(halves[1], ranges=(range(n // 2 + 1, n), range(2), range(3)))], 6 * n)
