"""The thread that generates, and everything that may happen to it between two forward steps.

    submit ─► waiting ─► running ─► done        pause: abort    running and waiting end at once
                 ▲           │                         retract  running ─► waiting, KV dropped
                 └─ retract ─┘                         in_place running stay, KV kept

All state below belongs to that thread. Others leave jobs in its inbox; a job runs between two
forward steps, never during one, and that is what makes a swap of the weights safe. Requests are
stepped one by one, so that a request's tokens do not depend on what else is in flight.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from .generation import Generation
from .model import ServedModel
from .sampling import choose

log = logging.getLogger("fp8bridge.rollout")

T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(slots=True)
class _Job:
    """A call and its future; in `waiting` it is a barrier that requests behind it do not pass."""

    call: Callable[[], Any]
    done: Future[Any]

    def run(self) -> None:
        try:
            self.done.set_result(self.call())
        except Exception as err:  # noqa: BLE001 - raised where the result is awaited
            self.done.set_exception(err)


class Engine:
    """Generates with `model`. Public methods may be called from any thread."""

    def __init__(self, model: ServedModel, *, weight_version: str, max_running_requests: int) -> None:
        self.model = model
        self.weight_version = weight_version
        """Of the tensors in `model.weights`; written only by jobs."""
        self.paused = False
        self._max_running = max_running_requests
        self._inbox: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._waiting: deque[Generation | _Job] = deque()
        self._running: deque[Generation] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="fp8bridge-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def load(self) -> dict[str, int]:
        """Counts at this moment, for people."""
        return {"num_running_reqs": len(self._running), "num_waiting_reqs": len(self._waiting)}

    def call(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` on the engine's thread, before the next forward step."""
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()
        self._inbox.put(_Job(job, done))
        return done

    def call_when_idle(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` once all requests submitted before it have ended; later ones wait for it.

        While generation is paused it runs at once: nothing is computed then.
        """
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()
        self.call(lambda: self._waiting.append(_Job(job, done)))
        return done

    def submit(self, generations: list[Generation]) -> None:
        """Queue requests; each one's `done` gets the generation itself, or the error of a step."""
        self.call(lambda: self._waiting.extend(generations))

    def pause(self, mode: PauseMode) -> Future[None]:
        return self.call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        return self.call(self._resume)

    def flush_cache(self) -> Future[bool]:
        """False while any request holds KV or, unless paused, waits."""
        return self.call(lambda: not self._running and (self.paused or not self._waiting))

    def abort(self, rid_prefix: str | None) -> Future[None]:
        """End every request whose id starts so (None: all), with the tokens it has."""
        return self.call(lambda: self._abort(rid_prefix))

    def set_version(self, version: str) -> None:
        """For jobs only."""
        self.weight_version = version

    def close(self) -> None:
        """Abort everything and end the thread."""
        self.call(self._close)
        self._thread.join()

    # The engine's thread.

    @torch.inference_mode()
    def _run(self) -> None:
        while not self._closing:
            self._run_jobs(block=not self._has_work())
            self._admit()
            if self._running and not self.paused:
                self._step()
        while not self._inbox.empty():
            self._inbox.get().done.set_exception(RuntimeError("the server is shutting down"))

    def _has_work(self) -> bool:
        return bool(self._running or self._waiting) and not self.paused

    def _run_jobs(self, *, block: bool) -> None:
        try:
            self._inbox.get(block=block).run()
            while True:
                self._inbox.get_nowait().run()
        except queue.Empty:
            return

    def _admit(self) -> None:
        if self.paused:
            self._run_barriers()
        while self._waiting and not self.paused:
            head = self._waiting[0]
            if isinstance(head, _Job):
                if self._running:
                    return
                self._waiting.popleft()
                head.run()
            elif len(self._running) < self._max_running:
                self._waiting.popleft()
                self._running.append(head)
            else:
                return

    def _run_barriers(self) -> None:
        barriers = [w for w in self._waiting if isinstance(w, _Job)]
        self._waiting = deque(w for w in self._waiting if isinstance(w, Generation))
        for barrier in barriers:
            barrier.run()

    def _pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode == "abort":
            self._abort(None)
        elif mode == "retract":
            while self._running:
                generation = self._running.pop()
                generation.cache = None
                generation.retractions += 1
                self._waiting.appendleft(generation)

    def _resume(self) -> None:
        self.paused = False

    def _abort(self, rid_prefix: str | None) -> None:
        def hit(entry: Generation | _Job) -> bool:
            return isinstance(entry, Generation) and (rid_prefix is None or entry.rid.startswith(rid_prefix))

        running = [g for g in self._running if hit(g)]
        waiting = [g for g in self._waiting if isinstance(g, Generation) and hit(g)]
        self._running = deque(g for g in self._running if not hit(g))
        self._waiting = deque(w for w in self._waiting if not hit(w))
        for generation in running:
            generation.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        for generation in waiting:
            generation.finish = {"type": "abort", "message": "Abort in waiting queue"}
        for generation in running + waiting:
            self._finish(generation)

    def _close(self) -> None:
        self._abort(None)
        self._run_barriers()
        self._closing = True

    def _step(self) -> None:
        """One forward of the first running request, which then goes to the end of the line."""
        generation = self._running[0]
        failure: Exception | None = None
        try:
            self._forward(generation)
        except (RuntimeError, ValueError) as err:
            log.exception("request %s failed", generation.rid)
            failure = err
        # It stayed in line until now, so that whoever looks at the load meanwhile sees it.
        self._running.popleft()
        if failure is not None:
            generation.cache = None
            generation.done.set_exception(failure)
        elif generation.finish is not None:
            self._finish(generation)
        else:
            self._running.append(generation)

    def _forward(self, generation: Generation) -> None:
        if generation.cache is None:
            generation.cache = self.model.new_cache()
            tokens = generation.tokens
        else:
            tokens = generation.output_ids[-1:]
        start = generation.first_wanted
        score = generation.input_logprobs is None and start < len(generation.prompt)
        logits = self.model.logits(tokens, generation.cache, keep=len(tokens) - start if score else 1)
        if not bool(torch.isfinite(logits).all()):
            raise ValueError(f"weight version {self.weight_version!r} gives NaN or Inf logits")
        if score:
            # Row i predicts the token after it; the row of the last prompt token is for sampling.
            logprobs = torch.log_softmax(logits[:-1], dim=-1)
            targets = torch.tensor(generation.prompt[start + 1 :], dtype=torch.long)
            generation.input_logprobs = [None, *logprobs.gather(1, targets[:, None])[:, 0].tolist()]
        token, logprob = choose(logits[-1], generation.sampling, generation.generator)
        generation.add(token, logprob, self.weight_version, self.model.eos_token_ids)

    def _finish(self, generation: Generation) -> None:
        generation.cache = None
        generation.done.set_result(generation)
