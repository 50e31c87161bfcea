"""The command line. Exit status: 0 done, 1 the run failed, 2 something was refused, 130 interrupted.

Only ``train``, ``resume``, ``eval`` and ``verify`` import torch, and not before their arguments are known to be good.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import htsrl
from htsrl.errors import ConfigError, HtsrlError

if TYPE_CHECKING:
    from htsrl.flags import Flags
    from htsrl.trials import VerifyOptions

INTERRUPTED = 130

OVERVIEW = f"""\
htsrl {htsrl.__version__}: fast reinforcement learning in which every run can be repeated,
bit for bit.

Try first:
  htsrl train --env CartPole-v1    balance a pole: less than a minute
  htsrl train --env gfootball      score a goal: about ten minutes on two cores
  htsrl eval RUN_DIR               how good that is; training prints RUN_DIR

Commands:
  train    train a policy
  resume   continue a run that was stopped, bit for bit
  eval     play episodes with a trained policy
  verify   check that no bit of a run depends on processes, delays and the like
  plot     draw the learning curves of one run or several, or a timeline
  doctor   what is installed, what is missing, and the command that gets it

Environments:
  gfootball, gfootball:SCENARIO    Google Research Football
  atari:Pong, ALE/Pong-v5          Atari games
  CartPole-v1, HalfCheetah-v5      any Gymnasium id; module:Id-v0 for your own
Algorithms: ppo, batchppo, a2c, impala, acktr

`htsrl COMMAND --help` says more. `htsrl train --env ENV --algo ALGO --help`
lists every setting, with the defaults for that environment and algorithm."""

TRAIN_HELP = """\
Train a policy. Shown are the settings of {algo} on {env}; name others with --algo and --env.

Examples:
  htsrl train --env CartPole-v1
  htsrl train --algo a2c --env atari:Pong --total-steps 2e6 --seed 3
  htsrl train --env gfootball:academy_3_vs_1_with_keeper --num-envs 32 --eval-every 50000
  htsrl train --config my_experiment.toml --learning-rate 1e-4

Ctrl-C ends a run with a checkpoint; pressed once more, it ends at once."""


RESUME_HELP = """\
usage: htsrl resume RUN_DIR [options]

Continue a run that was interrupted, that failed, or whose machine went down, from its
newest checkpoint, to the same end: the same bits as if it had never stopped. A run with
--schedule async goes on from there with new trajectories.

Options are those of `htsrl train` that don't change results:
  --layout rule|auto, --num-executors N|auto, --num-actors N|auto,
  --envs-per-group N|auto
  --checkpoint-every STEPS, --keep-checkpoints N
  --max-restarts N, --step-timeout SECONDS|none, --start-timeout SECONDS
  --eval-every STEPS, --eval-episodes N, --[no-]eval-stochastic
  --[no-]tensorboard, --[no-]record-digests, --progress auto|live|plain|none
  --trace FILE, --trace-after INTERVALS, --trace-intervals N
With --fork, a new run begins from the newest weights, and every option may change:
  htsrl resume RUN_DIR --fork --total-steps 2e6 --learning-rate 1e-4"""

VERIFY_HELP = """\
usage: htsrl verify [train options] [--layouts L,L,...] [--delays [MS]] [--kills] [--json]
       htsrl verify --against RUN_DIR [--layouts L] [--delays [MS]] [--json]

Run one configuration several times, on other processes and with other timing, and compare
every row, parameter and loss bit for bit; another seed must give other bits. Where runs
differ, the first interval, replica, step and field is named. Nothing is kept of the runs.

  --layouts 1x1,2x2,4x1   executors x actors; 2x2x1: in groups of one; the first is
                          what the others are compared with (default: these three)
  --delays [MS]           all layouts with random pauses of up to MS milliseconds in
                          executors, actors and learner, the first also without (default: 2)
  --kills                 all layouts while executors and actors are killed or stopped at
                          random moments and replaced, the first also without
  --against RUN_DIR       run RUN_DIR, which was trained with --record-digests, again, and
                          stop at the first interval that differs
  --json                  print JSON instead of a table

All options of `htsrl train` count, except for layouts and what a run writes and shows.
Without --total-steps, a run lasts {intervals} intervals. Exit status: 0 the same bits, 1 not.

Examples:
  htsrl verify --env CartPole-v1 --delays
  htsrl verify --env CartPole-v1 --total-steps 50000 --kills
  htsrl verify --env gfootball --num-envs 8 --sync-interval 32 --layouts 1x1,2x2x1,4x2
  htsrl verify --against runs/CartPole-v1-ppo-0-20260101-120000"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    _have_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that can't show a letter shows another
            stream.reconfigure(errors="replace")
    try:
        status = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except HtsrlError as error:
        _print_error(str(error))
        status = error.exit_status
    except KeyboardInterrupt:
        _print_error("interrupted")
        status = INTERRUPTED
    except BrokenPipeError:  # `htsrl ... | head`: the reader has seen enough
        status = 1  # Nothing else raises this: whoever writes to a pipe of a run handles its end
    return _flushed(status)


def _have_standard_streams() -> None:
    """Open what a service manager left closed: else a run's own file would get the number that messages go to."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))


def _flushed(status: int) -> int:
    """``status``, or 1 if output is lost. What nobody reads any more is dropped: Python would complain at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if error.errno not in (errno.EPIPE, errno.EIO):
                _print_error(f"output can't be written: {(error.strerror or str(error)).lower()}")
                status = status or 1
    return status


def _dispatch(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(OVERVIEW)
        return 0
    if command == "--version":
        print(f"htsrl {htsrl.__version__}")
        return 0
    if command not in COMMANDS:
        from htsrl.settings import near

        guess = near(command, COMMANDS)
        hint = f"did you mean `htsrl {guess}`?" if guess else f"the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"{command} is not a command; {hint}")
    return COMMANDS[command](rest)


def _train(arguments: list[str]) -> int:
    from htsrl import flags
    from htsrl.rundir import refuse_used
    from htsrl.settings import resolve
    from htsrl.tomlfile import toml_layer

    given = flags.parse(arguments)
    layers = [toml_layer(given.config_file)] if given.config_file else []
    config = resolve([*layers, given.layer()])
    if given.help:
        flags.show_help(config, TRAIN_HELP.format(algo=config.algo, env=config.env))
        return 0
    if config.output.run_dir is not None:
        refuse_used(config.output.run_dir)

    from htsrl.training import train

    return INTERRUPTED if train(config).interrupted else 0


def _resume(arguments: list[str]) -> int:
    from htsrl import flags

    if not arguments or arguments[0] in ("-h", "--help"):
        print(RESUME_HELP)
        return 0
    run_dir, *rest = arguments
    if run_dir.startswith("-"):
        raise ConfigError("the run's folder comes first: htsrl resume RUN_DIR [options]")
    forks = "--fork" in rest
    given = flags.parse([argument for argument in rest if argument != "--fork"])
    if given.config_file:
        raise ConfigError("--config is for `htsrl train`; a run is resumed with its own configuration")

    from htsrl.training import fork, resume

    if forks:
        return INTERRUPTED if fork(Path(run_dir), given.layer()).interrupted else 0
    result = resume(Path(run_dir), given.layer())
    if result is None:
        print(f"{run_dir} has finished already; nothing to do")
        return 0
    return INTERRUPTED if result.interrupted else 0


def _verify(arguments: list[str]) -> int:
    from htsrl import flags, trials
    from htsrl.rundir import plain
    from htsrl.settings import resolve
    from htsrl.tomlfile import toml_layer

    given = flags.parse(arguments)
    if given.help:
        print(VERIFY_HELP.format(intervals=trials.DEFAULT_INTERVALS))
        return 0
    own = trials.take_options(given.values)
    if own.against is not None:
        return _replay(own, given)
    layers = [toml_layer(given.config_file)] if given.config_file else []
    layers.append(given.layer())
    config = trials.with_total_steps(resolve(layers), layers)
    plan = trials.plan(config, own.layouts, own.delay_ms, own.kills)

    from htsrl import verify

    rows: list[verify.Row] = []
    if not own.json:
        print(f"{verify.heading(config)}\n\n{verify.head_line()}", flush=True)
    for row in verify.verify(plan):
        rows.append(row)
        if not own.json:
            print("\n".join(verify.row_lines(row, rows[0])), flush=True)
    print(json.dumps(plain(verify.as_json(config, rows)), indent=2) if own.json else f"\n{verify.verdict(rows)}")
    return 0 if all(row.ok for row in rows) else 1


def _replay(own: VerifyOptions, given: Flags) -> int:
    """``htsrl verify --against RUN_DIR``."""
    from htsrl.digests import read_digests
    from htsrl.rundir import CONFIG, plain, require_run
    from htsrl.tomlfile import load_config
    from htsrl.trials import with_layout

    assert own.against is not None
    if own.kills:
        raise ConfigError("--kills is not for --against: name the configuration itself, as for `htsrl train`")
    if given.values or given.config_file:
        flag = given.layer().spell(next(iter(given.values))) if given.values else "--config"
        raise ConfigError(f"--against runs {own.against} again as it was configured: leave out {flag}")
    require_run(own.against)
    read_digests(own.against)
    if own.layouts is not None:
        with_layout(load_config(own.against / CONFIG), own.layouts)

    from htsrl import verify

    outcome = verify.replay(own.against, own.layouts, own.delay_ms)
    print(
        json.dumps(plain({"ok": outcome.ok} | asdict(outcome)), indent=2) if own.json else verify.replay_line(outcome)
    )
    return 0 if outcome.ok else 1


def _eval(arguments: list[str]) -> int:
    parser = _Parser(
        "eval",
        "Play episodes with a run's newest checkpoint, from seeds that training never uses.",
        "htsrl eval runs/CartPole-v1-ppo-0-20260101-120000\n  htsrl eval RUN_DIR --episodes 20 --video game.mp4",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("--episodes", type=_count, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the most likely")
    parser.add_argument("--video", type=Path, metavar="FILE", help="film the first episode, for example game.mp4")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)

    from htsrl.rundir import plain, require_run

    require_run(given.run_dir)

    from htsrl.evaluation import evaluate_run

    outcome = plain(evaluate_run(given.run_dir, given.episodes, given.stochastic, given.video))
    print(json.dumps(outcome, indent=2) if given.json else "\n".join(_evaluation_lines(given.run_dir, outcome)))
    if given.video and not given.json:
        print(f"video: {given.video}")
    return 0


def _evaluation_lines(run_dir: Path, outcome: dict[str, Any]) -> list[str]:
    """A small table: whose policy, and its returns."""
    from htsrl.terminal import number

    policy = "sampled" if outcome.get("stochastic") else "most likely"
    after = f", checkpoint at {outcome['steps']:,} steps" if outcome.get("steps") else ""
    spread = [f"{number(outcome[f'return_{name}'])}" for name in ("std", "min", "max") if f"return_{name}" in outcome]
    rows = [
        ("episodes", f"{outcome['episodes']:,}, {policy} actions{after}"),
        ("return", number(outcome["return_mean"])),
    ]
    if len(spread) == 3:
        rows[-1] = ("return", f"{rows[-1][1]} ± {spread[0]}, from {spread[1]} to {spread[2]}")
    if outcome.get("score_mean") is not None:
        rows.append(("score", number(outcome["score_mean"])))
    if outcome.get("length_mean") is not None:
        rows.append(("length", f"{number(outcome['length_mean'])} steps"))
    return [str(run_dir), *(f"  {name:<9} {value}" for name, value in rows)]


def _plot(arguments: list[str]) -> int:
    parser = _Parser(
        "plot",
        "Draw learning curves against steps and time, one line per run; dots are evaluations.\n"
        "Or, with --timeline, what every process did during one interval of a traced run.",
        "htsrl plot runs/* -o curves.png\n"
        "  htsrl train --env CartPole-v1 --trace trace.json && htsrl plot --timeline trace.json",
    )
    parser.add_argument("run_dirs", type=Path, nargs="*", metavar="RUN_DIR", help="folders of runs")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="what `htsrl train --trace FILE` has written")
    parser.add_argument("--interval", type=_number, metavar="J", help="of the timeline (default: one of median length)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="picture (default: curves.png or timeline.png)"
    )
    given = parser.parse_args(arguments)
    if given.run_dirs and given.timeline:
        raise ConfigError("--timeline draws one file alone: leave out the folders of runs")
    if given.interval is not None and not given.timeline:
        raise ConfigError("--interval is for --timeline FILE")
    if given.timeline:
        from htsrl.timeline import plot_timeline

        output = given.output or Path("timeline.png")
        print("\n".join(plot_timeline(given.timeline, output, given.interval)))
        return 0
    if not given.run_dirs:
        parser.error("the following arguments are required: RUN_DIR")
    output = given.output or Path("curves.png")

    from htsrl.plot import plot_runs

    plot_runs(given.run_dirs, output)
    print(f"{output}: {len(given.run_dirs)} run{'s' if len(given.run_dirs) > 1 else ''}")
    return 0


def _doctor(arguments: list[str]) -> int:
    parser = _Parser("doctor", "What is installed, what is missing, and the command that gets it.", "htsrl doctor")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)

    from htsrl.doctor import run_doctor

    return run_doctor(json=given.json)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "resume": _resume,
    "eval": _eval,
    "verify": _verify,
    "plot": _plot,
    "doctor": _doctor,
}


class _Parser(argparse.ArgumentParser):
    """Refuses in one sentence instead of a usage message."""

    def __init__(self, command: str, description: str, example: str) -> None:
        super().__init__(
            prog=f"htsrl {command}",
            description=description,
            epilog=f"Examples:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_args(self, arguments: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse ``arguments``; what is unknown is refused with the nearest option there is."""
        from htsrl.settings import near

        namespace, unknown = self.parse_known_args(arguments)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            guess = near(unknown[0].partition("=")[0], options) if unknown[0].startswith("-") else None
            hint = f"did you mean {guess}?" if guess else f"`{self.prog} --help` lists the options"
            self.error(f"{unknown[0]} is not known; {hint}")
        return namespace

    def error(self, message: str) -> NoReturn:
        """Refuse, in a sentence that begins with the option's name."""
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            raise ConfigError(f"{self.prog} needs {missing}; `{self.prog} --help` says more")
        raise ConfigError(re.sub(r"^argument (\S+): ", r"\1 ", message))


def _count(text: str) -> int:
    return _number(text, least=1)


def _number(text: str, least: int = 0) -> int:
    number = int(text) if text.isdecimal() else -1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text}")
    return number


def _print_error(message: str) -> None:
    # It may quote a file or a child: a terminal must not obey what these say
    message = re.sub(r"[^\n\t -~\xa0-\U0010ffff]", "?", message)
    red = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    head = "\033[31mhtsrl: error:\033[0m" if red else "htsrl: error:"
    with contextlib.suppress(OSError):
        print(f"{head} {message}", file=sys.stderr)
