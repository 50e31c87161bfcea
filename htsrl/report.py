"""The reporter: every number of a run goes through it, to files, TensorBoard and the terminal."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.errors import HtsrlError, RunFailed
from htsrl.logfiles import JsonLines, TensorBoard, read_json_lines
from htsrl.rundir import DIGESTS, EVALUATIONS, METRICS, RESULT, plain, reason_of, update_result, writing
from htsrl.terminal import Board, QuietView, View, evaluation_line, facts_line, greeting, last_lines, make_view


class Reporter:
    """Writes ``metrics.jsonl``, ``evaluations.jsonl``, TensorBoard events and ``result.json``, and shows the run.

    A terminal that is gone is given up, and so are TensorBoard's events, which a resumed run writes again: the run goes
    on. A record that can't be written ends the run, which can be resumed: no file ever lacks a line in its middle.

    Raises:
        ConfigError: at once, where a file is a link to somewhere else.
        RunFailed: by every method that writes a record, and at the end: it can't be written.
    """

    def __init__(self, config: AnyConfig, spec: EnvSpec, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._board = Board(config, spec.has_score, spec.frame_skip)
        self._view: View = make_view(config.output.progress, self._board)
        self._records: dict[str, JsonLines] = {}
        self._events: TensorBoard | None = None
        try:
            with writing(run_dir):
                for name in (METRICS, EVALUATIONS, *([DIGESTS] if config.output.record_digests else ())):
                    self._records[name] = JsonLines(run_dir / name)
        except HtsrlError:
            self.close()
            raise
        if config.output.tensorboard:
            self._draw(lambda: self._open_events(run_dir))
        self._show(lambda: self._view.greet(greeting(config, run_dir)))

    def start(self, facts: Mapping[str, str]) -> None:
        """Show once what the run is: parameters, executors, actors, device, threads."""
        line = facts_line(self._config, facts)
        self._show(lambda: self._view.start(line))

    def interval(self, record: Mapping[str, float | int | None]) -> None:
        """Record an interval: a line of ``metrics.jsonl``, TensorBoard scalars at ``record['steps']``, the view."""
        numbers = plain(dict(record))
        self._board.update(numbers)
        numbers.setdefault("steps_per_second", self._board.speed)
        self._append(METRICS, numbers)
        self._draw_event(numbers)
        self._show(self._view.interval)

    def digests(self, record: Mapping[str, int | str]) -> None:
        """Record an interval's digests: a line of ``digests.jsonl``, where the configuration asks for them."""
        if DIGESTS in self._records:
            self._append(DIGESTS, dict(record))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Record an evaluation of the policy as it was at ``record['steps']``."""
        numbers = plain(dict(record))
        self._board.evaluation = numbers
        self._append(EVALUATIONS, numbers)
        self._draw_event(evaluation_scalars(numbers))
        line = evaluation_line(numbers)
        self._show(lambda: self._view.evaluation(line))

    def recovered(self, count: int) -> None:
        """Show how many processes were replaced so far."""
        self._board.recovered = count

    def note(self, message: str) -> None:
        """Show a line for the person: a warning."""
        self._show(lambda: self._view.note(message))

    def sync(self) -> None:
        """Return when all records would outlive this machine going down: a checkpoint relies on those before it.

        Raises:
            OSError: they would not.
        """
        for file in self._records.values():
            file.sync()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json`` and say how the run ended, where the checkpoint is and how to evaluate it."""
        try:
            update_result(self._run_dir, dict(result))
        except OSError as error:
            raise self._no_room(RESULT, error) from None
        lines = last_lines(plain(dict(result)), self._config, self._run_dir)
        self._show(lambda: self._view.finish(lines))

    def close(self) -> None:
        """Close the files and give the terminal back; twice is fine."""
        self._show(self._view.close)
        for file in (*self._records.values(), self._events):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()

    def _append(self, name: str, record: dict[str, Any]) -> None:
        try:
            self._records[name].append(record)
        except OSError as error:
            raise self._no_room(name, error) from None

    def _no_room(self, name: str, error: OSError) -> RunFailed:
        command = f"htsrl resume {shlex.quote(str(self._run_dir))}"
        return RunFailed(f"{self._run_dir / name} can't be written: {reason_of(error)}; make room, then `{command}`")

    def _open_events(self, run_dir: Path) -> None:
        """Open TensorBoard's file, and write into it what the files of a resumed run hold already."""
        self._events = TensorBoard(run_dir)
        for record in read_json_lines(run_dir / METRICS, "steps"):
            self._events.append(record)
        for record in read_json_lines(run_dir / EVALUATIONS, "steps"):
            self._events.append(evaluation_scalars(record))

    def _draw_event(self, record: dict[str, Any]) -> None:
        events = self._events
        if events is not None:
            self._draw(lambda: events.append(record))

    def _draw(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except OSError as error:
            if self._events is not None:
                self._events.close()
                self._events = None
            self.note(f"no more TensorBoard events in {self._run_dir}, the run goes on: {reason_of(error)}")

    def _show(self, show: Callable[[], None]) -> None:
        try:
            show()
        except OSError:  # nobody reads any more: a closed pipe, a terminal that is gone
            self._give_up_view()

    def _give_up_view(self) -> None:
        view, self._view = self._view, QuietView()
        if isinstance(view, QuietView):
            return
        with contextlib.suppress(OSError):
            view.close()
        with contextlib.suppress(OSError):
            self._view.note(f"nobody reads this output any more; the run goes on, see {self._run_dir / METRICS}")


def evaluation_scalars(record: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's numbers under the names that TensorBoard shows."""
    return {name if name == "steps" else f"eval/{name}": value for name, value in record.items()}
