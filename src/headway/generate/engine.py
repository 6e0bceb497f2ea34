"""Continuous batching: an engine that generates for requests which are added and end at any time.

Any thread may add requests and call `step`: one of them runs the step, the others wait for its end.

A step reads one packed row: the last token of every sequence being decoded (and its draft tokens), and chunks of
waiting prompts. A sequence is a page table, so that nothing is copied when another one ends or when a beam forks. Each
request of a batch gets what it would get alone: positions and masks belong to the sequence, random numbers to (seed,
request, step), and settings to the request.

Legend: N rows of logits, V vocab.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from headway.cache import PAGE
from headway.errors import ConfigError, HeadwayError
from headway.generate.constraints import Text
from headway.generate.drafts import Draft, Speculation
from headway.generate.jobs import Piece, advance, piece_of
from headway.generate.reader import Reader
from headway.generate.requests import Request
from headway.generate.sequences import Job, SampledText

STEP_TOKENS = 4096
"""Prompt tokens that a step reads at most, unless `step_tokens` is given."""
MOST_TOLD = 256
"""Prompt tokens whose log probabilities a step computes at most: each needs a row of logits."""


class Engine:
    """Generates for requests that are added at any time.

    Args:
        reader: of a decoder, or of an encoder-decoder, whose requests have sources.
        step_tokens: prompt tokens that a step reads at most.
        beside: the same for steps that also decode, whose new tokens wait for the prompts of other requests: this many
            tokens, or one for each decoding request if that is more; `step_tokens` unless given.
        draft: guesses tokens (`headway.generate.drafts`).
    """

    def __init__(
        self,
        reader: Reader,
        *,
        step_tokens: int | None = None,
        beside: int | None = None,
        draft: Draft | None = None,
    ) -> None:
        self.reader, self.step_tokens, self.beside = reader, step_tokens or STEP_TOKENS, beside
        self.speculation = None if draft is None else Speculation(draft)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self._added: list[Job] = []
        self._cancelled: list[Job] = []
        self._concerned: list[Job] = []  # the jobs that fail if the model raises
        self._turn = threading.Condition()
        self._reading, self._steps = False, 0

    # -- requests --------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Queues a request. Raises ConfigError for one that can never fit into the budget, or whose adapters are not
        available."""
        request = job.request
        if request.max_new_tokens < 1 and not job.untold:
            job.texts = []
            return
        budget = self.reader.cache.pool.budget
        if budget is not None and (need := self.most(request)) > budget:
            raise ConfigError(
                f"request {request.number} has up to {len(request.prompt) + request.max_new_tokens} tokens, whose keys "
                f"and values take {need} bytes, but the engine's budget is {budget}; ask for fewer new tokens, or "
                "raise the budget"
            )
        self.reader.check_adapters(request.config.adapters)
        with self._turn:
            self._added.append(job)
            self._take_in()

    def cancel(self, job: Job) -> None:
        """Ends a request, if it has not ended; its pages are freed at once, or after the step that reads them."""
        with self._turn:
            self._cancelled.append(job)
            self._take_in()

    def _take_in(self) -> None:
        """Applies what other threads added and cancelled, unless a step is running, which alone may change the queues
        then."""
        if self._reading:
            return
        self.waiting += self._added
        for job in [job for job in (*self.waiting, *self.running) if job in self._cancelled]:
            (self.running if job in self.running else self.waiting).remove(job)
            self._end(job)
        self._added, self._cancelled = [], []

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no requests."""
        return not (self.waiting or self.running or self._added)

    def run(self, jobs: Sequence[Job], most: int | None = None) -> Iterator[None]:
        """Adds these requests, `most` of them at a time (all unless given), and steps until they have ended; yields
        after every step.

        Raises the error of a request that failed. Requests that have not ended then, or when the generator is closed,
        are cancelled."""
        waiting, unfinished = deque(jobs), list[Job]()
        try:
            while True:
                unfinished = [job for job in unfinished if not job.ended]
                while waiting and (most is None or len(unfinished) < most):
                    self.add(waiting[0])
                    unfinished.append(waiting.popleft())
                if not all(job.ended for job in unfinished):
                    self.step()
                elif not waiting:
                    return
                if failed := next((job.error for job in unfinished if job.error is not None), None):
                    raise failed
                yield
        finally:
            for job in unfinished:
                if not job.ended:
                    self.cancel(job)

    def most(self, request: Request) -> int:
        """Returns the most bytes that the pages of a request may take."""
        pool, new, beams = self.reader.cache.pool, request.max_new_tokens, request.config.beams
        need = pool.most(len(request.prompt) + new, self.step_tokens)
        # each beam has its own new tokens, and its own copy of a page that it shared
        return need if beams is None else need + beams.width * pool.most(new + PAGE, 1)

    # -- a step ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Reads the next tokens of all sequences, or as many as fit, and chooses those that follow. If another thread
        is stepping, waits for the end of that step instead.

        A request fails alone (`error`) if its logits are not finite or its constraints exclude every token; an
        exception of the model fails the requests that it was about to read, and no others. Interrupts of the step
        (KeyboardInterrupt), and errors that concern no request, are raised in the calling thread."""
        with self._turn:
            if self._reading:
                step_count = self._steps
                self._turn.wait_for(lambda: self._steps != step_count)
                return
            self._reading = True
        try:
            if not self.is_idle:
                self._step()
        except BaseException as error:
            failure: BaseException = error
            if not isinstance(error, Exception):  # an interrupt, meant for this thread alone
                failure = HeadwayError(f"the step was interrupted ({type(error).__name__}); retry")
            concerned = [job for job in self._concerned if job in self.running]
            for job in concerned:
                job.fail(failure)
                self._end(job)
                self.running.remove(job)
            if failure is not error or not concerned:
                raise
        finally:
            with self._turn:
                self._reading, self._concerned, self._steps = False, [], self._steps + 1
                self._take_in()
                if not self.running:
                    self.reader.cache.shrink()
                self._turn.notify_all()

    def _step(self) -> None:
        self._admit()
        pieces = self._pieces()
        self._concerned = list({piece.job for piece in pieces})
        chunks = [(piece.text.table, piece.ids) for piece in pieces if piece.text.table is not None]
        sources = [piece.job.source for piece in pieces if piece.job.source is not None]
        adapters = [piece.job.request.config.adapters for piece in pieces]
        logits = self.reader.read(chunks, [piece.wanted for piece in pieces], sources, adapters)
        written: list[tuple[Job, range]] = []
        ended, begin = list[Job](), 0
        for piece in pieces:
            if piece.told:
                piece.job.tell(logits[begin : begin + piece.told])
                begin += piece.told
            count = len(piece.wanted) - piece.told
            if not piece.job.goes_on:
                ended.append(piece.job)
            elif count and written and written[-1][0] is piece.job:
                written[-1] = piece.job, range(written[-1][1].start, begin + count)
            elif count:
                written.append((piece.job, range(begin, begin + count)))
            begin += count
        live, ahead = written, 0  # `ahead` tokens of each draft have been accepted
        while live:
            advance(logits, [(job, rows[ahead : ahead + len(job.texts)]) for job, rows in live])
            live = [(job, rows) for job, rows in live if job.follows and job.goes_on]
            ahead += 1
        self._settle([*(job for job, _ in written), *ended])

    def _admit(self) -> None:
        """Admits waiting requests in order of arrival, while there is room for their prompts and for one more page of
        each sequence being decoded."""
        pool, taken = self.reader.cache.pool, []
        while self.waiting:
            job = self.waiting[0]
            config = job.request.config
            # if it asks for what others stored, or was preempted and has stored its prefix itself
            shares = job.count > 0 or (config.prefix_cache and not job.untold)
            for text in job.texts:
                text.table = self.reader.open(text.tokens, config.adapters, shares, config.cache_salt)
                job.stored = job.stored if job.count else len(text.table)
            if pool.available is not None and self.running:
                texts = [text for admitted in (*self.running, job) for text in admitted.texts]
                spare = sum(kind.nbytes for kind in pool.classes) * (len(texts) - len(job.texts))
                if sum(self._missing(text, len(text.rest)) for text in texts) + spare > pool.available:
                    self._release(job)
                    break
            self.waiting.popleft()
            self.running.append(job)
            taken.append(job)
        if self.reader.sources is not None and (new_jobs := [job for job in taken if job.source is None]):
            self._concerned = new_jobs
            tables = self.reader.sources.read([job.request.source or [] for job in new_jobs])
            for job, table in zip(new_jobs, tables, strict=True):
                job.source = table

    def _missing(self, text: Text, count: int) -> int:
        """Returns the bytes of pages that `count` more tokens of a sequence take."""
        return 0 if text.table is None else self.reader.cache.pool.missing(text.table, count)

    def _release(self, job: Job) -> None:
        """Releases the pages of a job's sequences."""
        for text in job.texts:
            if text.table is not None:
                self.reader.cache.pool.close(text.table)
                text.table = None

    def _pieces(self) -> list[Piece]:
        """Returns the pieces that the step reads: the last token and the draft of each sequence being decoded, and
        chunks of prompts of up to `step_tokens` (or `beside`) tokens together.

        Preempts the youngest requests until their pages have room."""
        ready = self._concerned = [job for job in self.running if job.is_ready]
        # sequences with a common prefix are adjacent, so that the kernels read its pages once
        ready.sort(key=lambda job: [] if (table := job.texts[0].table) is None else table.keys)
        if self.speculation is not None:
            self.speculation.propose([job for job in ready if job.count and isinstance(job, SampledText)])
        while True:
            beside = self.step_tokens if self.beside is None else max(self.beside, len(ready))
            tokens_left = min(beside, self.step_tokens) if ready else self.step_tokens
            pieces, told = [], MOST_TOLD
            for job in ready:
                wanted = range(1 + len(job.draft))
                for text in job.texts:
                    last_token = (text.ids or job.request.prompt)[-1]
                    pieces.append(Piece(job, text, [last_token, *job.draft], wanted))
            for job in self.running if len(ready) < len(self.running) else []:
                for text in [] if job.is_ready else job.texts:
                    piece = piece_of(job, text, tokens_left, told, self.reader.cache.pool.has_states)
                    if piece.ids:
                        pieces.append(piece)
                        tokens_left, told = tokens_left - len(piece.ids), told - piece.told
            available = self.reader.cache.pool.available
            if available is None or not self.reader.use_cache or len(self.running) == 1:
                return pieces
            if sum(self._missing(piece.text, len(piece.ids)) for piece in pieces) <= available:
                return pieces
            self._preempt()
            ready = [job for job in ready if job in self.running]

    def _preempt(self) -> None:
        """Moves the youngest request back to the head of the waiting queue and releases its pages."""
        job = self.running.pop()
        job.draft = []
        self._release(job)
        self.waiting.appendleft(job)

    def _settle(self, written: Sequence[Job]) -> None:
        """Ends a step: discards rejected draft tokens, stores the new tokens, and removes requests that have ended."""
        if self.speculation is not None:
            for job in written:
                if (table := job.texts[0].table) is not None:
                    self.reader.trim(table, len(job.draft) - job.right)
            self.speculation.settle(written)
        self.reader.end()
        for job in written:
            job.store(self.reader.cache.pool)
            if not job.goes_on:
                self._end(job)
                self.running.remove(job)

    def _end(self, job: Job) -> None:
        """Ends a job and releases all that it holds."""
        self._release(job)
        job.texts = []
        if job.source is not None and self.reader.sources is not None:
            self.reader.sources.close(job.source)
