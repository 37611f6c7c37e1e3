"""The walk over a feed's epochs, handed out in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tpuflow.data.chunks import Chunk
from tpuflow.data.feeding import Feed
from tpuflow.data.positions import START, Position
from tpuflow.data.prefetching import Ahead


@dataclass(frozen=True, slots=True)
class _EpochEnd:
    """The end of a pass; `source` is what describes the next one, beside its number."""

    source: Any


_Made = Chunk | _EpochEnd | Exception


class Walk:
    """An endless walk over the epochs of a feed, from a position on, handed out in pieces; the next chunk is made while one is used.

    Pieces may be taken ahead of their use: `position` is the place after the batches that were reported as `done`.

    An epoch is begun when it is asked for, so that what callbacks change between epochs takes effect; unless the walk is one of `steps`
    batches that go on over the epochs' ends: then its next epoch is begun ahead as well, as long as steps are left.
    """

    def __init__(self, feed: Feed, position: Position = START, *, steps: float | None = None):
        if position != START:
            feed.seek(position)
        self.position = position
        self._feed, self._steps, self._epoch = feed, steps, position.passes
        self._ahead = Ahead(self._make)
        self._made: deque[_Made] = deque()
        self._rest: Chunk | None = None
        self._end: _EpochEnd | None = None
        self._taken: deque[tuple[int, Chunk]] = deque()
        # Changed by `_make` only, on its thread:
        self._making, self._step = position.passes, 0
        self._chunks: Iterator[Chunk] | None = None

    def pieces(self, steps: int | None, *, within_epoch: bool = False) -> Iterator[Chunk]:
        """Chunks of `steps` batches altogether, over the epochs' ends unless `within_epoch`; of what is left of this epoch if None.

        At an epoch's end, the next call goes on with the next epoch.
        """
        within_epoch = within_epoch or steps is None
        while steps is None or steps > 0:
            if self._end is not None:
                self._begin_next()
            chunk = self._peek()
            if chunk is None and within_epoch:
                return
            if chunk is None:
                continue
            count = chunk.count if steps is None else min(chunk.count, steps)
            self._rest = chunk.part(count, chunk.count - count) if count < chunk.count else None
            piece = chunk.part(0, count)
            self._taken.append((self._epoch, piece))
            yield piece
            steps = None if steps is None else steps - count

    def epoch_is_over(self) -> bool:
        """Whether this epoch has no batch left; then the walk, and its position, go on to the next one."""
        if self._peek() is not None:
            return False
        end = self._begin_next()
        self.position = Position(self._epoch, 0, self.position.steps, end.source)
        return True

    def done(self, steps: int) -> None:
        """So many batches of those that were taken are done."""
        while steps:
            epoch, piece = self._taken.popleft()
            count = min(steps, piece.count)
            if count < piece.count:
                self._taken.appendleft((epoch, piece.part(count, piece.count - count)))
            total = self.position.steps + count
            self.position = Position(epoch, piece.batches + count, total, piece.source, piece.behind + count)
            steps -= count

    def take_back(self) -> None:
        """Have the batches that were taken and are not done come again: a round trip was cut short."""
        if self._taken:
            (_, piece), rest = self._taken.pop(), self._rest
            assert not self._taken, "a round trip takes a piece when the one before it is done"
            self._rest = piece if rest is None else replace(piece, count=piece.count + rest.count)

    def close(self) -> None:
        """End what is being made ahead; the walk cannot go on."""
        self._feed.stop()
        if self._ahead.settle() and isinstance(self._chunks, Generator):
            self._chunks.close()

    def _peek(self) -> Chunk | None:
        """What comes next in this epoch, without taking it; None at its end."""
        if self._rest is None and self._end is None:
            made = self._next()
            if isinstance(made, _EpochEnd):
                self._end = made
            else:
                self._rest = made
        return self._rest

    def _begin_next(self) -> _EpochEnd:
        end, self._end = self._end, None
        assert end is not None
        self._epoch += 1
        return end

    def _next(self) -> Chunk | _EpochEnd:
        """What was made next, chunk or end; then the one after it is begun."""
        if not self._made:
            self._made.extend(self._ahead.take())
            if self._chunks is not None if self._steps is None else self._step < self._steps:
                self._ahead.begin()
        made = self._made.popleft()
        if isinstance(made, Exception):
            raise made
        return made

    def _make(self) -> list[_Made]:
        """The next chunk; at an epoch's end that, and perhaps the first chunk of the next epoch, or the error that came instead."""
        made = self._chunk_or_end()
        if isinstance(made, Chunk) or self._steps is None or self._step >= self._steps:
            return [made]
        try:
            return [made, self._chunk_or_end()]
        except Exception as error:  # not due before the end of the epoch was heard of
            return [made, error]

    def _chunk_or_end(self) -> Chunk | _EpochEnd:
        if self._chunks is None:
            self._chunks = self._feed.epoch(self._making)
        chunk = next(self._chunks, None)
        if chunk is None:
            self._chunks, self._making = None, self._making + 1
            return _EpochEnd(self._feed.between_epochs())
        self._step += chunk.count
        return chunk
