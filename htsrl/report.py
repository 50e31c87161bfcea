"""The reporter: every number of a run goes through it, to files, TensorBoard and the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.logfiles import JsonLines, TensorBoard, read_json_lines
from htsrl.rundir import DIGESTS, EVALUATIONS, METRICS, RESULT, plain, update_result
from htsrl.terminal import Board, QuietView, View, evaluation_line, facts_line, greeting, last_lines, make_view

EVENTS = "TensorBoard events"


class Reporter:
    """Writes ``metrics.jsonl``, ``evaluations.jsonl``, TensorBoard events and ``result.json``, and shows the run.

    A file or terminal that can't be written to any more is given up with a note: the run goes on.
    """

    def __init__(self, config: AnyConfig, spec: EnvSpec, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._files: dict[str, JsonLines | TensorBoard] = {
            name: JsonLines(run_dir / name) for name in (METRICS, EVALUATIONS)
        }
        if config.output.record_digests:
            self._files[DIGESTS] = JsonLines(run_dir / DIGESTS)
        if config.output.tensorboard:
            self._files[EVENTS] = TensorBoard(run_dir)
            self._draw_past()  # of a resumed run
        self._board = Board(config, spec.has_score, spec.frame_skip)
        self._view: View = make_view(config.output.progress, self._board)
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
        self._append(EVENTS, numbers)
        self._show(self._view.interval)

    def digests(self, record: Mapping[str, int | str]) -> None:
        """Record an interval's digests: a line of ``digests.jsonl``, where the configuration asks for them."""
        self._append(DIGESTS, dict(record))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Record an evaluation of the policy as it was at ``record['steps']``."""
        numbers = plain(dict(record))
        self._board.evaluation = numbers
        self._append(EVALUATIONS, numbers)
        self._append(EVENTS, evaluation_scalars(numbers))
        line = evaluation_line(numbers)
        self._show(lambda: self._view.evaluation(line))

    def note(self, message: str) -> None:
        """Show a line for the person: a warning."""
        self._show(lambda: self._view.note(message))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json`` and say how the run ended, where the checkpoint is and how to evaluate it."""
        try:
            update_result(self._run_dir, dict(result))
        except OSError as error:
            self.note(f"no {RESULT} in {self._run_dir}: {_reason(error)}")
        lines = last_lines(plain(dict(result)), self._config, self._run_dir)
        self._show(lambda: self._view.finish(lines))

    def close(self) -> None:
        """Close the files and give the terminal back; twice is fine."""
        self._show(self._view.close)
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _draw_past(self) -> None:
        """Write what the run's files hold already as TensorBoard events."""
        for record in read_json_lines(self._run_dir / METRICS, "steps"):
            self._append(EVENTS, record)
        for record in read_json_lines(self._run_dir / EVALUATIONS, "steps"):
            self._append(EVENTS, evaluation_scalars(record))

    def _append(self, name: str, record: dict[str, Any]) -> None:
        file = self._files.get(name)
        if file is None:
            return
        try:
            file.append(record)
        except OSError as error:
            del self._files[name]
            self.note(f"no more {name} in {self._run_dir}, the run goes on: {_reason(error)}")

    def _show(self, show: Callable[[], None]) -> None:
        try:
            show()
        except OSError:  # nobody reads any more: a closed pipe, a terminal that is gone
            self._view = QuietView()


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def evaluation_scalars(record: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's numbers under the names that TensorBoard shows."""
    return {name if name == "steps" else f"eval/{name}": value for name, value in record.items()}
