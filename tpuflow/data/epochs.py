"""`EpochIterator`: the chunks of a feed, epoch after epoch, prefetched; used by the training loop, sinks and evaluations."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tpuflow.data.chunks import Chunk
from tpuflow.data.feeding import Feed
from tpuflow.data.positions import START, Position
from tpuflow.data.prefetching import Prefetcher


@dataclass(frozen=True, slots=True)
class _EpochEnd:
    """The end of an epoch; `source` is the state of the data source before the next one."""

    source: Any


_Item = Chunk | _EpochEnd | Exception


class EpochIterator:
    """An endless iterator over the epochs of a feed, from a position on. The next chunk is prefetched while one is in use.

    Chunks may be taken before they are used: `position` comes after the batches that were reported by `mark_done`.

    An epoch is started when its first chunk is asked for, so that what callbacks change between epochs takes effect. With `steps`, which
    limits the iterator to so many batches without regard to epochs, the next epoch is prefetched too as long as steps are left.
    """

    def __init__(self, feed: Feed, position: Position = START, *, steps: float | None = None):
        if position != START:
            feed.seek(position)
        self.position = position
        self._feed, self._steps, self._epoch = feed, steps, position.passes
        self._prefetcher = Prefetcher(self._make)
        self._prefetched: deque[_Item] = deque()
        self._rest: Chunk | None = None
        self._end: _EpochEnd | None = None
        self._taken: deque[tuple[int, Chunk]] = deque()
        # Changed by `_make` only, on its thread:
        self._making, self._step = position.passes, 0
        self._chunks: Iterator[Chunk] | None = None

    def chunks(self, steps: int | None, *, within_epoch: bool = False) -> Iterator[Chunk]:
        """Chunks with `steps` batches in all; across epochs' ends unless `within_epoch`. steps None: the rest of this epoch.

        After an epoch's end, the next call continues with the next epoch.
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

    def finish_epoch_if_over(self) -> bool:
        """Whether this epoch has no batch left. If so, the iterator and its position move on to the start of the next one."""
        if self._peek() is not None:
            return False
        end = self._begin_next()
        self.position = Position(self._epoch, 0, self.position.steps, end.source)
        return True

    def mark_done(self, steps: int) -> None:
        """Report that the next `steps` batches among those taken have been used; `position` moves on."""
        while steps:
            epoch, piece = self._taken.popleft()
            count = min(steps, piece.count)
            if count < piece.count:
                self._taken.appendleft((epoch, piece.part(count, piece.count - count)))
            total = self.position.steps + count
            self.position = Position(epoch, piece.batches + count, total, piece.source, piece.behind + count)
            steps -= count

    def put_back(self) -> None:
        """Put back the batches that were taken and not marked as done, after an interrupted round trip: `chunks` gives them again."""
        if self._taken:
            (_, piece), rest = self._taken.pop(), self._rest
            assert not self._taken, "a round trip takes a piece when the one before it is done"
            self._rest = piece if rest is None else replace(piece, count=piece.count + rest.count)

    def close(self) -> None:
        """Stop prefetching. The iterator cannot be used afterwards."""
        self._feed.stop()
        if self._prefetcher.join() and isinstance(self._chunks, Generator):
            self._chunks.close()

    def _peek(self) -> Chunk | None:
        """The next chunk of this epoch, without taking it; None at the epoch's end."""
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
        """The next chunk or epoch's end; the one after it is then prefetched."""
        if not self._prefetched:
            self._prefetched.extend(self._prefetcher.result())
            if self._chunks is not None if self._steps is None else self._step < self._steps:
                self._prefetcher.start()
        made = self._prefetched.popleft()
        if isinstance(made, Exception):
            raise made
        return made

    def _make(self) -> list[_Item]:
        """[the next chunk], or [the epoch's end]; if steps are left, with the next epoch's first chunk after the end, or its error."""
        made = self._chunk_or_end()
        if isinstance(made, Chunk) or self._steps is None or self._step >= self._steps:
            return [made]
        try:
            return [made, self._chunk_or_end()]
        except Exception as error:  # raised once the end of the epoch has been taken
            return [made, error]

    def _chunk_or_end(self) -> Chunk | _EpochEnd:
        if self._chunks is None:
            self._chunks = self._feed.epoch(self._making)
        chunk = next(self._chunks, None)
        if chunk is None:
            self._chunks, self._making = None, self._making + 1
            return _EpochEnd(self._feed.state_between_epochs())
        self._step += chunk.count
        return chunk
