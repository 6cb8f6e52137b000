"""The training loop: cycles of updates that never wait for the device, and one look at the results after each.

    trainer = Trainer(step=build_step(...), settings=settings, open_loader=..., store=store, emit=show, ...)
    trainer.resume();  trainer.run()

The step is the very object the ladder times. Losses and gradient norms of a cycle stay on the device and are read at
its end, all at once; evaluation, checkpoints, samples and the decision to stop happen there.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from redline.core.checkpoints import check_same_run
from redline.core.errors import UserError
from redline.core.training import Progress, TrainSettings
from redline.data.batches import BatchSource
from redline.engine import memory
from redline.engine.distributed import Ranks, alone
from redline.engine.parts import parts_of
from redline.engine.rank_stores import Store
from redline.engine.snapshot import (
    capture_rng,
    copy_into,
    load_optimizer_tensors,
    optimizer_tensors,
    restore_rng,
    with_all_states,
    without_state_of,
)
from redline.engine.step import TrainStep

ONE_REQUEST_SECONDS = 0.5  # signals within this time are one request

Emit = Callable[..., None]
"""emit(kind, **fields): 'cycle', 'validation', 'sample', 'checkpoint', 'note'. Called only between cycles, with numbers
that were already read, so no listener makes the device wait."""


class DivergedError(Exception):
    """Too many updates in a row had NaN or infinite gradients."""


class NotSavedError(Exception):
    """The last checkpoint is not on the disk; earlier ones are whole."""


class Trainer:
    def __init__(
        self,
        *,
        step: TrainStep,
        settings: TrainSettings,
        open_loader: Callable[[int, dict[str, Any] | None], BatchSource],
        validation: Callable[[], Iterable[torch.Tensor]],
        store: Store,
        identity: Mapping[str, Any],
        emit: Emit,
        sample: Callable[[], str] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`open_loader(position, state)` returns a source of batches for whole updates, [2, B, T], from that sequence
        on, or of a rank's share of them; `state` is the loader's state in the checkpoint. `validation()` returns the
        same few batches at every call. `ranks`: the ranks that train together, each with a trainer of its own."""
        self.ranks = ranks or alone()
        self.step, self.settings, self.store = step, settings, store
        self.open_loader, self.validation = open_loader, validation
        self.identity, self.emit, self.sample = dict(identity), emit, sample
        self.progress = Progress()
        self.loader: BatchSource | None = None
        self.data_state: dict[str, Any] | None = None
        self.saved_at = self.validated_at = -1
        self.asked = False
        self.told_saved: int | None = None
        self.told_failure: UserError | None = None
        self.validation_loss: float | None = None
        self.last_loss: float | None = None
        self.peak_bytes: int | None = None
        self.epoch: float | None = None
        """Epochs that have passed; an integer if the length of an epoch is unknown."""
        self.began: tuple[int, float] = (0, 0.0)
        """Tokens and epochs that had passed when this session's loader was opened."""
        # If the optimizer cannot skip a bad update on the device, the host must check: correctness before speed.
        step.may_wait = not step.skips_on_device and not step.plan.loss_scaling

    # --- from a checkpoint and back -----------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Resume from the newest whole checkpoint, or return False. Another model, tokenizer or dataset is refused."""
        loaded = self.store.latest()
        for note in self.store.notes:
            self.emit("note", text=note)
        if loaded is None:
            return False
        check_same_run(loaded.path, loaded.identity, self.identity)
        # Memory-mapped on the host and copied one by one, without what other stages hold.
        tensors, elsewhere, cuts = loaded.tensors(), self.step.shared.elsewhere, self.step.shared.cuts
        targets = parts_of(dict(self.step.model.named_parameters()), cuts)
        copy_into(targets, tensors.of("model").without(elsewhere), what="model")
        copy_into(self.step.adapter.state(self.step.model), tensors.of("buffers"), what="model")
        load_optimizer_tensors(
            self.step.optimizer,
            self.step.model,
            tensors.of("optimizer").without(elsewhere),
            without_state_of(elsewhere, loaded.state["optimizer"]),
            cuts,
        )
        self.step.scaler.load_state_dict(loaded.state["scaler"])
        self.step.steps_taken = loaded.state["steps_taken"]
        self.progress = Progress(**loaded.state["progress"], rates=[])
        self.data_state = loaded.state.get("data")
        restore_rng(loaded.state["rng"], self.step.device)  # last: building things draws random numbers
        self.saved_at = self.progress.updates
        if loaded.metric is not None:  # of these weights: a finished run need not evaluate again
            self.validated_at, self.validation_loss = self.progress.updates, loaded.metric
        self.emit("note", text=f"resumed from {loaded.path.name} at step {self.progress.updates:,}")
        return True

    def save(self) -> None:
        """Save a checkpoint, unless nothing has changed since the last one. It is written during further training."""
        if self.saved_at == self.progress.updates:
            return
        self.store.wait()  # so that the previous save is reported, however long its writing took
        self._report_saves()
        state_tensors, state_values = optimizer_tensors(self.step.optimizer, self.step.model)
        if self.step.shared.elsewhere:
            state_values = with_all_states(self.ranks.gather(state_values))
        kinds: dict[str, Mapping[str, torch.Tensor]] = {
            "model": dict(self.step.model.named_parameters()),
            "buffers": self.step.adapter.state(self.step.model),
            "optimizer": state_tensors,
        }
        cuts = self.step.shared.cuts
        tensors = {f"{kind}.{name}": t for kind, found in kinds.items() for name, t in parts_of(found, cuts).items()}
        progress = {name: value for name, value in asdict(self.progress).items() if name != "rates"}
        self.store.save(
            step=self.progress.updates,
            tensors=tensors,
            state={
                "optimizer": state_values,
                "scaler": self.step.scaler.state_dict(),
                "steps_taken": self.step.steps_taken,
                "progress": progress,
                "data": self.data_state if self.loader is None else self.loader.state(),
                "rng": capture_rng(self.step.device),
            },
            identity=self.identity,
            # A loss of other weights would make rotation keep the wrong checkpoint as the best.
            metric=self.validation_loss if self.validated_at == self.progress.updates else None,
        )
        self.saved_at = self.progress.updates

    def _report_saves(self) -> None:
        """Report what has been saved since the last call, and what has failed: training continues, as earlier
        checkpoints are whole."""
        saved, failure = self.store.last_saved, self.store.last_error
        if failure is not None and failure is not self.told_failure:
            self.emit("note", text=str(failure))
        elif saved is not None and saved != self.told_saved:
            self.emit("checkpoint", updates=saved)
            self.told_saved = saved
        self.told_failure = failure

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Train until the budget is used up or a signal asks to stop, and return which it was."""
        position = self.progress.updates * self.settings.global_batch
        self.loader = loader = self.open_loader(position, self.data_state)
        self.began = (self.progress.tokens, loader.epoch)
        # A run that is asked to stop still finishes the checkpoint being written: leaving the store waits for it.
        with asked_to_stop(self.ranks.ask) as asked, self.store, closing(loader):
            with self.ranks.marking():
                while (why := self._why_over(asked)) is None:
                    if self._cycle(loader, asked):
                        self._between_cycles()
            if why != "interrupted":
                self._validate()
            self.ranks.mark(self.step.steps_taken, "saving")
            self.save()
            failure = self.store.wait()
            self._report_saves()
            if failure is not None:
                raise NotSavedError(f"{failure.problem}: {failure.why}; free some space and continue with --resume")
        return why

    def _why_over(self, asked: Callable[[], str | None]) -> str | None:
        """Return why training is over, or None. All ranks return the same: they agreed on it after the cycle."""
        if self.asked or self._leaves_now(asked):
            return "interrupted"
        return self.settings.budget.used_up(self.progress)

    def _leaves_now(self, asked: Callable[[], str | None]) -> bool:
        """True if a single process was asked to stop. Several ranks stop together, at the end of the cycle."""
        return self.ranks.count == 1 and asked() is not None

    def _cycle(self, loader: BatchSource, asked: Callable[[], str | None]) -> bool:
        """Run a cycle; return False if it made no update because the run was asked to stop."""
        started, waited, documents = time.perf_counter(), loader.waited_seconds, loader.documents
        memory.reset_peak(self.step.device)
        losses, norms = self._queue_updates(loader, asked)
        if not losses:
            return False
        self.ranks.mark(self.step.steps_taken, "reading the losses")
        known = self.step.shared.share_figures(torch.stack([*losses, *norms]))
        figures = self.ranks.mean(known).tolist()  # the only wait of the cycle
        self.epoch = loader.epoch
        mine = Look(
            seconds=time.perf_counter() - started,
            waited=loader.waited_seconds - waited,
            documents=loader.documents - documents if self.ranks.counts else 0,
            peak_bytes=memory.peak_bytes(self.step.device),
            asked=asked() is not None,
        )
        self._account(figures[: len(losses)], figures[len(losses) :], agreed(self.ranks.gather(mine)))
        return True

    def _queue_updates(
        self, loader: BatchSource, asked: Callable[[], str | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return losses and gradient norms, on the device: nothing in here waits for it (`tests/gpu/test_train.py`)."""
        losses, norms = [], []
        for _ in range(self._updates_to_go()):
            self.ranks.mark(self.step.steps_taken, "waiting for its batch")
            try:
                batch = next(loader)
            except (OSError, EOFError, RuntimeError):
                time.sleep(ONE_REQUEST_SECONDS)  # the signal that ended the loader's processes may reach this one last
                if not self._leaves_now(asked):
                    raise
                break
            self.ranks.mark(self.step.steps_taken, "in the step")
            losses.append(self.step(batch))
            norms.append(self.step.gradient_norm)
            if self._leaves_now(asked):
                break
        return losses, norms

    def _updates_to_go(self) -> int:
        """Return the number of updates in the next cycle, which ends where something is due: the same things happen at
        the same updates, whatever the length of a cycle."""
        settings, done = self.settings, self.progress.updates
        limits = [settings.cycle_steps]
        for every in (settings.eval_every, settings.checkpoint_every, settings.sample_every):
            if every is not None:
                limits.append(every - done % every)
        if settings.budget.steps is not None:
            limits.append(settings.budget.steps - done)
        if settings.budget.tokens is not None:
            per_update = settings.global_batch * self.step.adapter.workload.shape.sequence
            limits.append(math.ceil((settings.budget.tokens - self.progress.tokens) / per_update))
        return max(1, min(limits))

    def _account(self, losses: list[float], norms: list[float], look: Look) -> None:
        progress, shape, seconds = self.progress, self.step.adapter.workload.shape, look.seconds
        progress.documents += look.documents
        self.asked = look.asked
        tokens = len(losses) * self.settings.global_batch * shape.sequence
        progress.updates += len(losses)
        progress.tokens += tokens
        progress.seconds += seconds
        progress.rates.append(tokens / seconds)
        skipped_at = []
        for update, norm in enumerate(norms, progress.updates - len(norms) + 1):
            progress.skipped_in_a_row = 0 if math.isfinite(norm) else progress.skipped_in_a_row + 1
            skipped_at += [] if math.isfinite(norm) else [update]
        progress.skipped += len(skipped_at)
        good = [loss for loss in losses if math.isfinite(loss)]
        self.last_loss = sum(good) / len(good) if good else None
        peak_bytes = look.peak_bytes
        self.peak_bytes = None if peak_bytes is None else max(peak_bytes, self.peak_bytes or 0)
        self.emit(
            "cycle",
            updates=progress.updates,
            tokens=progress.tokens,
            losses=losses,
            loss=self.last_loss,
            gradient_norms=norms,
            learning_rate=self.step.optimizer.param_groups[0]["lr"],  # of the last update
            seconds=seconds,
            total_seconds=progress.seconds,
            tokens_per_second=tokens / seconds,
            data_wait=look.waited / seconds,
            skipped=progress.skipped,
            skipped_at=skipped_at,
            peak_bytes=peak_bytes,
            documents=progress.documents,
            epoch=self.epoch,
            epoch_seconds=self._epoch_seconds(tokens / seconds),
        )
        if progress.skipped_in_a_row >= self.settings.most_skipped:
            raise DivergedError(
                f"{progress.skipped_in_a_row} updates in a row were skipped: their gradients are not finite "
                f"(last at step {progress.updates:,})"
            )

    def _epoch_seconds(self, tokens_per_second: float) -> float | None:
        """Return the seconds of an epoch at this cycle's speed. The length of an epoch is estimated from the session so
        far, since a stream's epoch advances in jumps."""
        tokens, passed = self.progress.tokens - self.began[0], (self.epoch or 0) - self.began[1]
        return tokens / passed / tokens_per_second if isinstance(passed, float) and passed > 0 else None

    def _between_cycles(self) -> None:
        settings, done = self.settings, self.progress.updates
        self._report_saves()
        if settings.eval_every is not None and done % settings.eval_every == 0:
            self._validate()
        if settings.sample_every is not None and done % settings.sample_every == 0 and self.sample is not None:
            self.ranks.mark(self.step.steps_taken, "writing a sample")
            self.emit("sample", updates=done, text=self.sample())
        over = settings.budget.used_up(self.progress) is not None  # then `run` saves, after the last evaluation
        if settings.checkpoint_every is not None and done % settings.checkpoint_every == 0 and not over:
            self.ranks.mark(self.step.steps_taken, "saving")
            self.save()

    def _validate(self) -> None:
        """Compute the mean loss over the same batches every time. They are all of one size, so it is the mean over
        their tokens. Gradients stay enabled, though they are not used: without them a compiled loss would be compiled a
        second time."""
        progress, losses = self.progress, []
        if self.validated_at == progress.updates:
            return
        self.validated_at = progress.updates
        self.ranks.mark(self.step.steps_taken, "validating")
        with self.step.shared.whole(), self.step.adapter.evaluating(self.step.model):
            for batch in self.validation():
                losses.append(self._loss_of(batch))
                progress.validation_tokens += self.step.adapter.items(batch)
        if not losses:
            return
        known = self.step.shared.share_figures(torch.stack(losses).mean())
        loss = self.ranks.mean(known).item()  # one number for all ranks: it decides which checkpoint is best
        self.validation_loss = loss
        if math.isfinite(loss):
            best = progress.best_validation
            progress.best_validation = loss if best is None else min(best, loss)
        self.emit(
            "validation",
            updates=progress.updates,
            tokens=progress.tokens,
            loss=loss,
            validation_tokens=progress.validation_tokens,
        )

    def _loss_of(self, batch: Any) -> torch.Tensor:
        """Return the loss of a validation batch, in pieces that fit a micro batch: a run may resume with a smaller one
        because memory ran out. Pieces of another size than the micro batch cost a compiled step another compilation,
        once, in a session that changed it."""
        pieces = self.step.adapter.pieces(batch, self.settings.micro_batch)
        losses = [self.step.loss(piece).detach() * share for piece, share in pieces]  # a factor of 1.0 changes no bit
        return torch.stack(losses).sum()


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a rank saw of a cycle, on the host."""

    seconds: float
    waited: float
    documents: int
    peak_bytes: int | None
    asked: bool


def agreed(looks: list[Look]) -> Look:
    """Combine the ranks' looks: rank 0's clock for all, since a budget of minutes must be used up on all ranks at once;
    the longest wait for data; the highest memory peak; the sum of documents; and all stop if one was asked to."""
    peaks = [look.peak_bytes for look in looks if look.peak_bytes is not None]
    return Look(
        seconds=looks[0].seconds,
        waited=max(look.waited for look in looks),
        documents=sum(look.documents for look in looks),
        peak_bytes=max(peaks, default=None),
        asked=any(look.asked for look in looks),
    )


@contextmanager
def asked_to_stop(on_request: Callable[[], None] | None = None) -> Iterator[Callable[[], str | None]]:
    """Ctrl-C and SIGTERM end the cycle and save; a second Ctrl-C exits at once. Signals within a moment of the first
    belong to the same request: GNU timeout and job managers signal a process and its group separately. `on_request` is
    called in the handler, so that the request is known even to code that runs after the block has failed."""
    asked: list[float] = []

    def note(number: int, _: object) -> None:
        now = time.monotonic()
        if asked and number == signal.SIGINT and now - asked[0] > ONE_REQUEST_SECONDS:
            raise KeyboardInterrupt
        asked.append(now)
        if on_request is not None:
            on_request()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: "interrupted" if asked else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
